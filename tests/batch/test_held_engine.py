"""A whole batch job whose engine is held by a write of its trace for longer than an event loop waits."""

import json
import os
import subprocess
import sys

from jaxserve.engine.engine_lock import PATIENCE_S
from jaxserve.faults import ALLOW_VARIABLE
from tests.batch.lines import completion

SHAPES = ("--dtype=float32", "--max_num_seqs=4", "--num_pages=80", "--max_model_len=128", "--decode_buckets=4")
ROWS = ("--prefill_buckets=16", "--table_width_buckets=8", "--max_num_batched_tokens=16")


def test_a_job_whose_trace_is_on_a_slow_disk_ends_with_status_0(tiny_model_dir, compile_cache, tmp_path):
    lines, plan, results = (tmp_path / name for name in ("lines.jsonl", "plan.json", "results.jsonl"))
    lines.write_text(
        "".join(json.dumps(completion(str(number), max_tokens=1 + number % 5)) + "\n" for number in range(40))
    )
    plan.write_text(
        json.dumps([{"at": "trace.write", "do": "hang", "seconds": PATIENCE_S + 0.3, "skip": 3, "times": 8}])
    )
    files = (f"--input={lines}", f"--output={results}", f"--trace_file={tmp_path / 'trace.jsonl'}")
    own = (f"--model={tiny_model_dir}", f"--compile_cache={compile_cache}", f"--fault_plan={plan}")
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve.batch", *own, *SHAPES, *ROWS, *files],
        capture_output=True,
        text=True,
        timeout=250,
        env=os.environ | {ALLOW_VARIABLE: "1"},
    )
    assert done.returncode == 0, done.stderr
    assert len(results.read_text().splitlines()) == 40

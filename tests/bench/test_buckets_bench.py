"""bench buckets: programs and padding of a workload, counted by hand for one small enough."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.bench.__main__ import main
from jaxserve.bench.buckets import PaddingCount
from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.plan import DecodeRow, DecodeRows, PrefillChunk, StepPlan
from jaxserve.tables import Bucket, BucketTable

ROOT = Path(__file__).parents[2]


def test_padding_of_two_plans_worked_by_hand():
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, prefill_chunk=32, max_model_len=128)
    count = PaddingCount(BucketTable(config, decode=(2, 4), prefill=(8, 32), widths=(2, 8)), 16)
    count.add(StepPlan(0, prefill=(PrefillChunk("a", 0, 0, tuple(range(17)), True),)))
    count.add(StepPlan(1, decode=DecodeRows.of([DecodeRow("a", 0, 17), DecodeRow("b", 1, 40)])))
    # 17 of 32 prompt tokens beside 4 decode rows (a quarter of 32 is no less); 2 of 2 decode rows.
    assert count.used == {Bucket(4, 32, 8, 2), Bucket(2, 0, 0, 8)}
    assert (count.tokens, count.rows) == (17 + 2, 36 + 2)
    # Tables: 2 pages of 12 rows x 2; 2 + 3 pages of 2 rows x 8.
    assert (count.pages, count.entries) == (2 + 2 + 3, 24 + 16)


def test_more_sizes_are_more_programs_and_less_padding(tmp_path):
    workload = {"requests": [{"arrival": 0, "prompt_len": 60, "max_tokens": 5} for _ in range(12)]}
    (tmp_path / "w.json").write_text(json.dumps(workload))
    output = tmp_path / "figures.json"
    main(["bench", "buckets", f"--workload={tmp_path / 'w.json'}", "--slots=4", f"--output={output}"])
    results = {result["sizes"]: result for result in json.loads(output.read_text())["results"]}
    limits, chosen, doubling = (results[name] for name in ("limits alone", "chosen", "doubling"))
    assert limits["programs"] == 2 + 2 + 1 < chosen["programs"] < doubling["programs"]
    for figure in ("row_padding", "table_padding"):
        assert 1 > limits[figure] >= chosen[figure] >= doubling[figure] > 0
    assert limits["row_padding"] > doubling["row_padding"]
    assert len({result["iterations"] for result in results.values()}) == 1


def test_a_request_beyond_the_context_is_refused(tmp_path, capsys):
    (tmp_path / "w.json").write_text('{"requests": [{"prompt_len": 9000, "max_tokens": 1}]}')
    with pytest.raises(SystemExit):
        main(["bench", "buckets", f"--workload={tmp_path / 'w.json'}"])
    assert "a request of 9001 tokens; the limit here is 8192" in capsys.readouterr().err


def test_it_needs_no_jax():
    code = (
        "import sys; from jaxserve.bench.__main__ import main; main(['bench', 'buckets', '--slots=8']);"
        "print('loaded:', sorted({'jax', 'jaxlib'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "rows padded" in run.stdout and run.stdout.endswith("loaded: []\n")

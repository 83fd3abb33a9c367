#!/usr/bin/env python3
"""Runs a workload on OpenVINO GenAI's ContinuousBatchingPipeline, and prints what `bench serve` would of a server.

    python3 -m venv DIR && DIR/bin/pip install openvino-genai
    DIR/bin/python tools/peers/openvino_peer.py --gguf=FILE --workload=w1 --slots=8 --dtype=bf16 [--output=F]

All requests are added at once; tokens are greedy and do not end at EOS. The first run of a GGUF file converts it, into
the folder `openvino_ir` beside it (or --ir). Needs the peer's environment only: nothing of jaxserve's dependencies.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai

READY = "ready"
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from jaxserve.bench.host import machine  # noqa: E402
from jaxserve.bench.load.figures import Objectives, figures, medians  # noqa: E402
from jaxserve.bench.load.record import COMPLETED, Record  # noqa: E402


def main() -> None:
    """Converts where needed, runs, prints."""
    options = parse()
    workload = Path(options.workload)
    if options.workload in ("w1", "w2"):
        workload = ROOT / "configs" / "workloads" / f"{options.workload}.json"
    requests = json.loads(workload.read_text())["requests"]
    ir = Path(options.ir or Path(options.gguf).parent / "openvino_ir")
    convert(Path(options.gguf), ir)
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = options.slots
    scheduler.max_num_batched_tokens = options.max_num_batched_tokens
    scheduler.cache_size = options.cache_gib
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    pipeline = genai.ContinuousBatchingPipeline(
        str(ir),
        scheduler,
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": options.dtype,
            "KV_CACHE_PRECISION": options.dtype,
            "INFERENCE_NUM_THREADS": options.threads,
        },
    )
    one_run(pipeline, requests[: options.slots], most=16)  # warm-up
    if options.on_demand:
        # A run for every line read, so that another engine can have its turns (tools/peers/pairs).
        print(READY, flush=True)
        for _ in sys.stdin:
            print(json.dumps(one_run(pipeline, requests)), flush=True)
        return
    runs = [one_run(pipeline, requests) for _ in range(options.runs)]
    result = {"peer": f"OpenVINO GenAI {genai.__version__}", "dtype": options.dtype, "slots": options.slots}
    document = {
        "what": "serve",
        "machine": machine(),
        "settings": vars(options),
        "results": [result | medians(runs) | {"runs": runs}],
    }
    text = json.dumps(document, indent=2)
    if options.output:
        Path(options.output).write_text(text + "\n")
    print(text)


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", required=True, help="the model; the demo model's lies in JAXSERVE_CACHE")
    parser.add_argument("--ir", help="folder of the converted model; default: openvino_ir beside the GGUF file")
    parser.add_argument("--workload", default="w1", help="w1, w2 or a file of that form")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--max_num_batched_tokens", type=int, default=512)
    parser.add_argument("--cache_gib", type=int, default=2, help="of KV pages")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--on_demand", action="store_true", help="for tools/peers/pairs")
    parser.add_argument("--output", help="write the JSON to this file too")
    return parser.parse_args()


def convert(gguf: Path, ir: Path) -> None:
    """Writes the model's IR to `ir`, unless it is there."""
    if (ir / "openvino_model.xml").exists():
        return
    genai.LLMPipeline(str(gguf), "CPU", enable_save_ov_model=True)
    ir.mkdir(parents=True, exist_ok=True)
    for path in gguf.parent.glob("openvino_*"):  # it writes them beside the GGUF file
        if path.is_file():
            path.rename(ir / path.name)


def one_run(pipeline: genai.ContinuousBatchingPipeline, requests: list[dict], most: int = 1 << 30) -> dict:
    """Figures of one run; outputs are cut at `most` tokens."""
    began = time.monotonic()
    live = []
    for number, request in enumerate(requests):
        config = genai.GenerationConfig()
        config.max_new_tokens = min(request["max_tokens"], most)
        config.ignore_eos = True
        config.do_sample = False
        ids = ov.Tensor(np.asarray([request["prompt_ids"]], np.int64))
        record = Record(began, len(request["prompt_ids"]), config.max_new_tokens, sent_at=time.monotonic())
        live.append((pipeline.add_request(number, ids, config), record))
    records = [record for _, record in live]
    while live:
        pipeline.step()
        now = time.monotonic()
        left = []
        for handle, record in live:
            while handle.can_read():
                for output in handle.read().values():
                    record.token_at += [now] * len(output.generated_ids)
            record.num_output = len(record.token_at)
            if record.num_output >= record.max_tokens:
                record.ended_at, record.outcome = now, COMPLETED
            else:
                left.append((handle, record))
        live = left
    return figures(records, Objectives())


if __name__ == "__main__":
    main()

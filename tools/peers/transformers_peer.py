#!/usr/bin/env python3
"""Runs a workload on Hugging Face transformers in process, a run for every line read: a side of `tools/peers/pairs`.

    python3.11 -m venv DIR && DIR/bin/pip install torch==2.13.0 transformers accelerate
    DIR/bin/python tools/peers/transformers_peer.py --model=FOLDER --workload=w1 --slots=8 --dtype=bfloat16 --static

FOLDER is in Hugging Face layout (tools/convert_checkpoint). Tokens are greedy and do not end at EOS. Without
--static the requests go to its continuous batching, all at once; with it, to `generate` in batches of --slots, padded
to the left, each as long as its longest output, of which every request's own length counts. Needs the peer's
environment only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

ROOT = Path(__file__).resolve().parents[2]
NO_EOS = -1


def main() -> None:
    """Loads, says that it is ready, and runs when told to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder in Hugging Face layout")
    parser.add_argument("--workload", default="w1", help="w1, w2 or a file of that form")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--static", action="store_true", help="`generate` in batches")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    workload = Path(options.workload)
    if options.workload in ("w1", "w2"):
        workload = ROOT / "configs" / "workloads" / f"{options.workload}.json"
    requests = json.loads(workload.read_text())["requests"]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    one_run = static if options.static else continuous
    one_run(model, [request | {"max_tokens": 4} for request in requests[: options.slots]], options.slots)  # warm-up
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.monotonic()
        num_output = one_run(model, requests, options.slots)
        print(json.dumps({"output_tokens_per_s": num_output / (time.monotonic() - began)}), flush=True)


@torch.inference_mode()
def static(model: torch.nn.Module, requests: list[dict], slots: int) -> int:
    """Output tokens of batches one after the other."""
    for first in range(0, len(requests), slots):
        batch = requests[first : first + slots]
        width = max(len(request["prompt_ids"]) for request in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            prompt = torch.tensor(request["prompt_ids"])
            ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
        longest = max(request["max_tokens"] for request in batch)
        config = GenerationConfig(
            max_new_tokens=longest, min_new_tokens=longest, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        found = model.generate(ids, attention_mask=mask, generation_config=config)
        assert found.shape[1] == width + longest
    return sum(request["max_tokens"] for request in requests)


def continuous(model: torch.nn.Module, requests: list[dict], slots: int) -> int:
    """Output tokens of the requests given to its manager all at once."""
    config = GenerationConfig(do_sample=False, eos_token_id=NO_EOS, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        page_size=32, num_blocks=2048, max_batch_tokens=512, max_requests_per_batch=slots, allow_block_sharing=False
    )
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=batching)
    manager.start()
    for request in requests:
        manager.add_request(request["prompt_ids"], max_new_tokens=request["max_tokens"], eos_token_id=NO_EOS)
    left, num_output = len(requests), 0
    while left:
        result = manager.get_result(timeout=1)
        if result is None:
            assert manager.is_running(), "its thread ended"
        elif result.is_finished():
            assert result.error is None, result.error
            left -= 1
            num_output += len(result.generated_tokens)
    manager.stop(block=True)
    assert num_output == sum(request["max_tokens"] for request in requests), num_output
    return num_output


if __name__ == "__main__":
    main()

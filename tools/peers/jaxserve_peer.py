"""Runs a workload on jaxserve's engine in process, a run for every line read: the other side of `tools/peers/pairs`.

    python tools/peers/jaxserve_peer.py --model=smollm2-135m --workload=w1 --slots=8 --dtype=bfloat16 [NAME=VALUE ...]

with the project's Python; NAME=VALUE are settings of `EngineConfig`.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import time
from typing import Any

from jaxserve import LLM, SamplingParams
from jaxserve.bench.load.requests import read_items
from jaxserve.bench.offline import figures
from jaxserve.engine.stats import EngineStats


def main() -> None:
    """Makes the engine, says that it is ready, and runs when told to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--workload", default="w1")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("settings", nargs="*", type=setting)
    options = parser.parse_args()
    _, items = read_items(options.workload)
    settings: dict[str, Any] = {"max_num_batched_tokens": 512, "enable_prefix_caching": False}
    llm = LLM(
        options.model,
        dtype=options.dtype,
        max_num_seqs=options.slots,
        max_model_len=max(len(item.prompt) + item.max_tokens for item in items),
        skip_tokenizer_init=True,
        **settings | dict(options.settings),
    )
    prompts = [list(item.prompt) for item in items]
    params = [SamplingParams(temperature=0, max_tokens=item.max_tokens, ignore_eos=True) for item in items]
    llm.generate(prompts[: options.slots], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    print("ready", flush=True)
    for _ in sys.stdin:
        llm.engine.stats = EngineStats()
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        print(json.dumps(figures(llm.engine.stats, time.perf_counter() - began, options.slots)), flush=True)


def setting(text: str) -> tuple[str, Any]:
    """A setting of the engine; its value as Python would read it, else a text."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


if __name__ == "__main__":
    main()

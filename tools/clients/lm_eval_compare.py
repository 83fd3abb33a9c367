"""lm-eval's log-likelihoods against the engine's own and against transformers' (tests/golden/smollm2_golden.json).

Usage: python tools/clients/lm_eval_compare.py FOLDER    from the project's folder, with its Python
FOLDER is the --output_path of a run with --log_samples on the tasks of tools/clients/lm_eval (docs/clients.md), made
with a server of SmolLM2 in float32. Exits with 1 where two differ.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxserve import LLM, SamplingParams

GOLDEN = Path("tests/golden/smollm2_golden.json")
TOLERANCE = 1e-3
"""Most that two sums over up to 60 tokens differ by: the golden file has five digits, batches round differently."""


def main(folder: str) -> int:
    """The status to exit with."""
    llm = LLM("smollm2-135m", dtype="float32", max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=128)
    golden = {case["name"]: case["prompt_logprobs"] for case in json.loads(GOLDEN.read_text())["cases"]}
    worst = 0.0
    for sample in samples(folder, "jaxserve_capitals"):
        for (score, _), text in zip(sample["filtered_resps"], asked(sample), strict=True):
            worst = max(worst, differ(f"capitals {text!r}", float(score), own(llm, *text)))
    for sample in samples(folder, "jaxserve_golden"):
        name, score = sample["doc"]["name"], float(sample["filtered_resps"][0])
        worst = max(worst, differ(f"golden {name}, engine", score, own(llm, "<|im_start|>", sample["doc"]["text"])))
        worst = max(worst, differ(f"golden {name}, transformers", score, sum(golden[name][1:])))
    print(f"largest difference of a sum: {worst:.1e}; the limit is {TOLERANCE:g}")
    return int(worst > TOLERANCE)


def own(llm: LLM, context: str, continuation: str) -> float:
    """The engine's log-probability of `continuation` after `context`."""
    start = len(llm.engine.tokenizer.encode(context))
    ids = llm.engine.tokenizer.encode(context + continuation)
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    scores = llm.generate([ids], params, use_tqdm=False)[0].prompt_logprobs
    return sum(entry[token].logprob for entry, token in list(zip(scores, ids, strict=True))[start:])


def asked(sample: dict) -> list[tuple[str, str]]:
    """Context and continuation of each choice."""
    arguments = sample["arguments"]
    return [(arguments[key]["arg_0"], arguments[key]["arg_1"]) for key in sorted(arguments)]


def samples(folder: str, task: str) -> Iterator[dict]:
    """The newest run's samples of a task."""
    files = sorted(Path(folder).rglob(f"samples_{task}_*.jsonl"))
    if not files:
        sys.exit(f"{folder} has no samples of {task}; run lm-eval with --log_samples and --output_path={folder}")
    return map(json.loads, files[-1].read_text().splitlines())


def differ(what: str, got: float, want: float) -> float:
    """One line of output; the difference."""
    print(f"{what}: lm-eval {got:.5f}, here {want:.5f}")
    return abs(got - want)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

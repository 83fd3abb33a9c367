"""What one process and several must answer alike; `python -m tests.hosts.scenarios` is process 0 of several."""

from __future__ import annotations

import json
import sys

from jaxserve import LLM, SamplingParams, StructuredOutputs

SETTINGS = dict(
    dtype="float32",
    max_model_len=128,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    prefill_chunk=16,
    page_size=16,
    num_pages=15,
    reservation="optimistic",
    preemption="recompute",
    max_decode_steps=4,
    max_arrival_delay_s=1e6,
    enable_lora=True,
    max_loras=2,
    decode_buckets=(4,),
    prefill_buckets=(32,),
    table_width_buckets=(8,),
    compile_cache="",
)
"""Few pages: requests are preempted."""


def make_llm(model, adapters, **settings):
    return LLM(str(model), lora_modules=(f"a={adapters}/a",), **(SETTINGS | settings))


def answers(llm, adapters):
    """Ids and log-probabilities of every kind of request, and how the engine got to them."""
    found = {}

    def run(name, prompts, *params, **more):
        outputs = llm.generate(prompts, list(params) * (len(prompts) // len(params)), use_tqdm=False, **more)
        found[name] = [[choice.token_ids for choice in output.outputs] for output in outputs]
        found[f"{name} logprobs"] = [
            [[entry.logprob for entry in position.values()] for position in listed or () if position]
            for output in outputs
            for listed in (output.prompt_logprobs, *(choice.logprobs for choice in output.outputs))
        ]
        return outputs

    def greedy(count=24, **more):
        return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)

    long = [(7 * i) % 251 for i in range(90)]
    run("chunks", [long, [5, 6], long[:41]], greedy(logprobs=4, prompt_logprobs=1))
    before = llm.engine.stats.cache_hits
    run("cached", [long, [*long[:50], 3, 4]], greedy())
    found["cache hits"] = llm.engine.stats.cache_hits - before
    run("preempted", [[i] * 30 for i in range(6)], greedy(70))
    found["preempted"] = sum(llm.engine.scheduler.counters.recomputed_tokens_of.values()) > 0
    seeded = [SamplingParams(temperature=0.9, seed=i, top_p=0.9, max_tokens=20, n=2, ignore_eos=True) for i in range(2)]
    run("seeded", [[1, 2, 3], long[:20]], *seeded)
    edits = dict(repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={65: 3.0}, min_tokens=3)
    run("edits", [[1, 2, 3], [9] * 7], SamplingParams(temperature=0.7, seed=5, max_tokens=20, **edits))
    grammar = SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputs(regex="[a-c]{4,9}x"))
    run("grammar", ["Say: ", "Go: "], grammar)
    steps = llm.engine.stats.steps - llm.engine.stats.iterations
    run("loops", [[1, 2], [3, 4]], greedy(40))
    found["steps in loops"] = llm.engine.stats.steps - llm.engine.stats.iterations > steps
    llm.load_lora_adapter("b", f"{adapters}/b")
    run("adapters", [[1, 2, 3], list(range(40)), [9] * 7], greedy(), lora=["a", "b", ""])
    llm.engine.scheduler.check_invariants()
    return found


def diverged(llm):
    """What is said once the follower is given another step than this process takes."""
    from jaxserve.hosts.channel import Channel
    from jaxserve.hosts.messages import Kind

    send = Channel.send

    def altered(self, kind, *parts):
        if kind == Kind.STEP:
            parts = [*parts[:2], bytes(parts[2])[:-1] + b"\1", *parts[3:]]
        send(self, kind, *parts)

    Channel.send = altered
    try:
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


if __name__ == "__main__":
    model, adapters, settings, out = sys.argv[1:5]
    llm = make_llm(model, adapters, **json.loads(settings))
    found = answers(llm, adapters)
    with open(out, "w") as file:
        json.dump([found, diverged(llm) if "diverge" in sys.argv[5:] else None], file)

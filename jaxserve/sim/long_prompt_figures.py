"""Figures of a long prompt among decoding requests: what they feel of it, whole and in chunks."""

from __future__ import annotations

from jaxserve.sim.cost_model import StepFeatures
from jaxserve.sim.figure import MILLISECONDS, Figure
from jaxserve.sim.lengths_run import slot_config
from jaxserve.sim.report import Objectives, figures
from jaxserve.sim.roofline import CHIPS, ModelShape, RooflineCost
from jaxserve.sim.simulator import Simulator
from jaxserve.sim.source import Arrival, TimedSource, make_request, prompt_of

CHIP = "v6e"
LLAMA_3_1_8B = ModelShape(32, 4096, 14336, 32, 8, 128, 128256, tied_embeddings=False)
NUM_DECODING, PROMPT, OUTPUT = 31, 200, 64
LONG_PROMPT, CHUNK = 6000, 512
ARRIVES_AT = 0.5
"""Seconds; the others are in the middle of their outputs."""


def long_prompt() -> list[Figure]:
    """ITL of the others and TTFT of the long prompt."""
    return [*_figures("unchunked", LONG_PROMPT), *_figures(f"prefill_chunk {CHUNK}", CHUNK)]


def _figures(name: str, chunk: int) -> list[Figure]:
    cost = RooflineCost(CHIPS[CHIP], LLAMA_3_1_8B)
    arrivals = [
        *(
            Arrival(0.0, make_request(f"r{n}", prompt_of(n, PROMPT), OUTPUT), OUTPUT, "others")
            for n in range(NUM_DECODING)
        ),
        Arrival(ARRIVES_AT, make_request("long", prompt_of(NUM_DECODING, LONG_PROMPT), OUTPUT), OUTPUT, "long"),
    ]
    config = slot_config(
        NUM_DECODING + 1,
        LONG_PROMPT + OUTPUT,
        max_num_batched_tokens=8192,
        prefill_chunk=chunk,
        num_pages=cost.num_pages(16, 0.9),
    )
    classes = figures(Simulator(config, cost, TimedSource(iter(arrivals))).run(), Objectives())["classes"]
    itl, ttft = classes["others"]["itl_s"], classes["long"]["ttft_s"]
    # The iteration that carries a whole chunk behind `start` tokens of its prompt, with nobody decoding.
    start = LONG_PROMPT - chunk
    alone = cost.step_s(
        StepFeatures(
            prefill_tokens=chunk,
            prefill_attention=start * chunk + chunk * (chunk + 1) // 2,
            prefill_context=LONG_PROMPT,
            emitted=1,
        )
    )
    topic = f"A prompt of {LONG_PROMPT:,} tokens among {NUM_DECODING} decoding requests"
    scope = (
        f"roofline of one {CHIP} and Llama 3.1 8B in bfloat16; {NUM_DECODING + 1} slots;"
        f" the others: prompt {PROMPT}, output {OUTPUT}"
    )
    return [
        Figure(topic, f"ITL p50 of the others, {name}", 1e3 * itl["p50"], MILLISECONDS, scope),
        Figure(topic, f"ITL p99 of the others, {name}", 1e3 * itl["p99"], MILLISECONDS, scope),
        Figure(
            topic,
            f"ITL max of the others, {name}",
            1e3 * itl["max"],
            MILLISECONDS,
            scope,
            1e3 * alone,
            "at least: its last chunk alone" if start else "at least: the prompt alone",
        ),
        Figure(topic, f"TTFT of the long prompt, {name}", 1e3 * ttft["max"], MILLISECONDS, scope),
    ]

"""Figures of batching schemes: which share of the slots' iterations gives tokens when lengths differ.

The schemes are the scheduler's setting `batching`; time is the number of iterations (`lengths_run.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import batched

import numpy as np

from jaxserve.sim.figure import RATIO, SHARE, Figure
from jaxserve.sim.lengths_run import run_lengths

SLOTS = 8
LONG_AND_SHORT = (900, *7 * (40,))
BACKLOG = 7 * 22 * (40,)
"""Behind it: keeps the seven other slots busy about as long as the long request holds the first."""
EVENLY_SPREAD = tuple(round(20 + 180 * index / 7) for index in range(SLOTS))
TEXTBOOK_SUM = (20, 35, 50, 80, 100, 120, 160, 200)
"""Lengths from 20 to 200 with the sum that a loss of 52.19 % of 1,600 slot-steps leaves, 765; many sets have it."""
MEAN, LONGEST = 32, 512
LOAD = 0.9
"""Tokens asked for over tokens that busy slots would give; so in the mean, a draw differs."""
NUM_ARRIVALS = 480
OFFLINE_MEAN, NUM_OFFLINE = 64, 256


def long_among_short() -> list[Figure]:
    """One long request in a static batch, and what continuous batching makes of the same time."""
    topic = "One request of 900 tokens, seven of 40"
    alone = run_lengths(LONG_AND_SHORT, SLOTS, "static")
    queued = (*LONG_AND_SHORT, *BACKLOG)
    static, continuous = (run_lengths(queued, SLOTS, batching) for batching in ("static", "continuous"))
    batch = f"iterations; {SLOTS} slots; the batch alone"
    backlog = f"iterations; {SLOTS} slots; {len(BACKLOG)} requests of 40 behind the batch"
    return [
        Figure(
            topic,
            "slot utilisation, static",
            alone.slot_utilisation,
            SHARE,
            batch,
            static_utilisation(LONG_AND_SHORT),
            "sum over slots x longest; textbook: 16.4 %",
        ),
        Figure(topic, "slot utilisation, continuous", continuous.slot_utilisation, SHARE, backlog, 1.0, "ideal"),
        Figure(
            topic,
            "tokens per iteration, continuous with backlog over static without",
            continuous.tokens_per_iteration / alone.tokens_per_iteration,
            RATIO,
            backlog,
            1.0 / static_utilisation(LONG_AND_SHORT),
            "ideal: every slot busy",
        ),
        Figure(
            topic,
            "tokens per iteration, continuous over static, both with backlog",
            continuous.tokens_per_iteration / static.tokens_per_iteration,
            RATIO,
            backlog,
            1.0 / static_utilisation(queued),
            "ideal: every slot busy",
        ),
    ]


def mixed_lengths() -> list[Figure]:
    """Slot-steps that a static batch of mixed lengths loses."""
    return [
        Figure(
            "Lengths from 20 to 200 in one static batch",
            f"slot-steps lost, {name}",
            1.0 - run_lengths(outputs, SLOTS, "static").slot_utilisation,
            SHARE,
            f"iterations; {SLOTS} slots; lengths {', '.join(map(str, outputs))}",
            0.5219,
            basis,
        )
        for name, outputs, basis in (
            ("evenly spread", EVENLY_SPREAD, "textbook, of other lengths"),
            ("sum as the textbook's", TEXTBOOK_SUM, "textbook"),
        )
    ]


def length_variance() -> list[Figure]:
    """Throughput under steady arrivals as the spread of output lengths grows."""
    topic = "Throughput as lengths vary more, of what busy slots would give"
    rng = np.random.default_rng(0)
    gaps = rng.exponential(MEAN / (SLOTS * LOAD), NUM_ARRIVALS)
    instants = np.cumsum(gaps).tolist()
    draws = {
        "constant": np.full(NUM_ARRIVALS, float(MEAN)),
        "uniform": rng.integers(1, 2 * MEAN, NUM_ARRIVALS).astype(float),
        "exponential": rng.exponential(MEAN, NUM_ARRIVALS),
        # exp(mu + sigma^2 / 2) is the mean of a lognormal; sigma 1.
        "lognormal": rng.lognormal(np.log(MEAN) - 0.5, 1.0, NUM_ARRIVALS),
    }
    found: list[Figure] = []
    for kind, lengths in draws.items():
        outputs = [int(length) for length in np.clip(np.rint(lengths), 1, LONGEST)]
        scope = (
            f"iterations; {SLOTS} slots; {NUM_ARRIVALS} poisson arrivals; outputs of {np.mean(outputs):.0f} tokens"
            f" in the mean, deviation {np.std(outputs) / np.mean(outputs):.2f} of it"
        )
        offered, full_batches = sum(outputs) / (SLOTS * instants[-1]), static_utilisation(outputs)
        for batching in ("static", "request_dynamic", "continuous"):
            run = run_lengths(outputs, SLOTS, batching, instants, batch_timeout_s=float(MEAN))
            expected, basis = offered, "offered"
            if batching != "continuous" and full_batches < offered:
                expected, basis = full_batches, "full batches"
            name = f"{kind}, {batching}"
            found.append(Figure(topic, name, run.slot_utilisation, SHARE, scope, expected, basis))
    return found


def offline_batches() -> list[Figure]:
    """When static batching is as good: equal lengths, a single batch, or lengths known beforehand."""
    # Of n draws from a uniform distribution the largest is (n - 1) / (n + 1) of the way from the middle to the end.
    share = (SLOTS - 1) / (SLOTS + 1)
    endless = "mean of a run without end"
    return [
        _offline(0.0, NUM_OFFLINE, 1.0, "nothing to gain"),
        *(_offline(spread, NUM_OFFLINE, 1.0 + spread * share, endless) for spread in (0.1, 0.25, 0.5, 0.9)),
        _offline(0.5, SLOTS, 1.0, "one batch: both wait for its longest"),
        *(_offline(0.5, count, 1.0 + 0.5 * share, endless) for count in (2 * SLOTS, 8 * SLOTS)),
        _offline(0.5, NUM_OFFLINE, 1.0, "near: batches of like lengths", longest_first=True),
    ]


def _offline(spread: float, count: int, expected: float, basis: str, longest_first: bool = False) -> Figure:
    low, high = round(OFFLINE_MEAN * (1 - spread)), round(OFFLINE_MEAN * (1 + spread))
    outputs = np.random.default_rng(0).integers(low, high, count, endpoint=True).tolist()
    if longest_first:
        outputs.sort(reverse=True)
    static, continuous = (run_lengths(outputs, SLOTS, batching) for batching in ("static", "continuous"))
    order = ", longest first" if longest_first else ""
    return Figure(
        "Offline, all there at once: throughput, continuous over static",
        f"lengths {OFFLINE_MEAN} ± {spread:.0%}, {count} requests{order}",
        static.iterations / continuous.iterations,
        RATIO,
        f"iterations; {SLOTS} slots; uniform lengths",
        expected,
        basis,
    )


def static_utilisation(outputs: Sequence[int], num_slots: int = SLOTS) -> float:
    """By arithmetic: the sum of the lengths over slots x the longest of each batch, in order."""
    return sum(outputs) / (num_slots * sum(max(batch) for batch in batched(outputs, num_slots)))

"""Continuous batching on real steps: no decode row waits for a prompt, no slot for the longest request."""

import json

import numpy as np
import pytest

from jaxserve import LLM
from jaxserve.core import Request
from jaxserve.testing.tiny import write_tiny_model
from tests.engine.conftest import assert_idle_clean, greedy, ids, random_prompts


def records_of(path):
    """The iterations of a trace file."""
    return [record for record in map(json.loads, path.read_text().splitlines()) if "kind" not in record]


@pytest.fixture
def traced(make_llm, tmp_path):
    """`traced(**settings)`: a tiny engine and the file it writes its trace to, closed after the test."""
    made = []

    def make(**settings):
        trace = tmp_path / "trace.jsonl"
        # Prompts run alone first and are to be computed again beside others.
        made.append(make_llm(trace_file=str(trace), enable_prefix_caching=False, **settings))
        return made[-1], trace

    yield make
    for llm in made:
        llm.engine.close()


class Streams:
    """Requests of one engine by name, and the ids each has got so far."""

    def __init__(self, llm):
        self.engine = llm.engine
        self.deltas = {}

    def add(self, name, prompt, max_tokens):
        sink = self.deltas.setdefault(name, []).append
        self.engine.add(Request(name, tuple(prompt), greedy(max_tokens), max_tokens=max_tokens), 0, sink)

    def ids(self, name):
        return [token for delta in self.deltas[name] for token in delta.token_ids]

    def step_until(self, done):
        for _ in range(1000):
            if done():
                return
            self.engine.step()
        raise AssertionError("not done after 1000 steps")

    def finish(self):
        self.step_until(lambda: not self.engine.has_work)


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_a_decoding_request_gets_a_token_in_every_iteration_of_long_prompts(traced, num_prompts):
    budget = 16
    llm, trace = traced(max_num_seqs=4, max_num_batched_tokens=budget, prefill_chunk=8)
    names = ("steady", "long0", "long1")[: 1 + num_prompts]
    prompts = dict(zip(names, random_prompts((5, 100, 90)), strict=False))
    wanted = dict(zip(names, (60, 8, 8), strict=False))
    alone = {name: ids(llm.generate(prompts[name], greedy(wanted[name]), use_tqdm=False))[0] for name in names}
    first_record = len(records_of(trace))

    streams = Streams(llm)
    streams.add("steady", prompts["steady"], wanted["steady"])
    streams.step_until(lambda: len(streams.ids("steady")) >= 3)
    for name in names[1:]:
        streams.add(name, prompts[name], wanted[name])
    steps = 0
    while not all(streams.ids(name) for name in names[1:]):
        before = len(streams.ids("steady"))
        streams.engine.step()
        steps += 1
        assert len(streams.ids("steady")) == before + 1, f"step {steps}"
    streams.finish()

    assert steps >= 12  # 100 tokens in chunks of 8
    assert {name: streams.ids(name) for name in names} == alone
    records = records_of(trace)[first_record:]
    prefilling = [r for r in records if any(name != "steady" for name, _ in r["prefill"])]
    assert len(prefilling) >= 12
    assert all("steady" in r["decode"] for r in prefilling)
    assert sum(len(r["prefill"]) == num_prompts for r in prefilling) >= 10
    for record in records:
        tokens = len(record["decode"]) + sum(count for _, count in record["prefill"])
        assert tokens == budget - record["unused_budget"] and 0 < tokens <= budget
    assert_idle_clean(llm)


def test_sch_4_a_prompt_of_64_chunks_costs_no_decode_row_a_token(traced):
    """Nor one that joins amid it; no iteration has more tokens than the budget."""
    budget, chunk = 6, 3
    llm, trace = traced(max_num_seqs=3, max_model_len=256, max_num_batched_tokens=budget, prefill_chunk=chunk)
    prompts = dict(zip(("steady", "long", "joiner"), random_prompts((5, 64 * chunk, 2), seed=6), strict=True))
    wanted = {"steady": 120, "long": 4, "joiner": 70}
    alone = {name: ids(llm.generate(prompts[name], greedy(wanted[name]), use_tqdm=False))[0] for name in prompts}
    first_record = len(records_of(trace))

    streams = Streams(llm)
    streams.add("steady", prompts["steady"], wanted["steady"])
    streams.step_until(lambda: len(streams.ids("steady")) >= 3)
    streams.add("long", prompts["long"], wanted["long"])
    for _ in range(20):
        streams.engine.step()
    streams.add("joiner", prompts["joiner"], wanted["joiner"])
    streams.step_until(lambda: streams.ids("joiner"))
    while not streams.ids("long"):
        before = {name: len(streams.ids(name)) for name in ("steady", "joiner")}
        streams.engine.step()
        assert {name: len(streams.ids(name)) - before[name] for name in before} == {"steady": 1, "joiner": 1}
    streams.finish()

    assert {name: streams.ids(name) for name in prompts} == alone
    records = records_of(trace)[first_record:]
    beside = [r for r in records if any(name == "long" for name, _ in r["prefill"])]
    assert len(beside) == 64
    assert all("steady" in r["decode"] for r in beside) and sum("joiner" in r["decode"] for r in beside) > 30
    assert all(len(r["decode"]) + sum(count for _, count in r["prefill"]) <= budget for r in records)
    assert_idle_clean(llm)


def test_slots_stay_busy_beside_one_request_of_900_tokens(tmp_path):
    """The textbook's batch, one of 900 tokens and seven of 40, then a backlog of 40s: see the trace."""
    num_slots = 8
    batch = [900] + 7 * [40]
    static = sum(batch) / (num_slots * max(batch))  # of a batch that runs until its longest output ends
    assert static == pytest.approx(0.164, abs=5e-4)

    trace = tmp_path / "trace.jsonl"
    llm = LLM(
        str(write_tiny_model(tmp_path / "model", max_position=1024)),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=num_slots,
        max_num_batched_tokens=64,
        page_size=16,
        num_pages=num_slots * 64 + 1,
        decode_buckets=(num_slots,),
        prefill_buckets=(64,),
        table_width_buckets=(64,),
        compile_cache="",
        trace_file=str(trace),
    )
    lengths = batch + 7 * 22 * [40]
    outputs = llm.generate([[1, 2, 3]] * len(lengths), [greedy(n) for n in lengths], use_tqdm=False)
    llm.engine.close()
    assert [len(tokens) for tokens in ids(outputs)] == lengths
    records = records_of(trace)
    busy = np.array([len(r["decode"]) + len(r["prefill"]) for r in records]) / num_slots
    while_queued = busy[[bool(r["queue"]) for r in records]]
    assert len(while_queued) > 800
    assert while_queued.mean() > 0.95
    assert busy.mean() > 0.95
    assert len(records) < 1000  # static batching: 900 and 22 times 40
    assert_idle_clean(llm)


@pytest.mark.parametrize(
    ("num_slots", "budget", "lengths"),
    [(8, 8, (20,)), (4, 16, (100,)), (8, 256, (125, 125))],
    ids=["a token per slot", "chunks", "budget above the context"],
)
def test_the_largest_steps_run(traced, num_slots, budget, lengths):
    """A token in every slot and no token of the budget left, then every slot decoding."""
    llm, trace = traced(max_num_seqs=num_slots, max_num_batched_tokens=budget)
    num_decoding = num_slots - len(lengths)
    prompts = random_prompts((*range(1, num_decoding + 1), *lengths), seed=4)
    wanted = [60] * num_decoding + [3] * len(lengths)
    names = [f"r{i}" for i in range(num_slots)]
    alone = [ids(llm.generate(p, greedy(n), use_tqdm=False))[0] for p, n in zip(prompts, wanted, strict=True)]
    first_record = len(records_of(trace))

    streams = Streams(llm)
    for index in range(num_decoding):
        streams.add(names[index], prompts[index], wanted[index])
    streams.step_until(lambda: all(streams.ids(name) for name in names[:num_decoding]))
    for index in range(num_decoding, num_slots):
        streams.add(names[index], prompts[index], wanted[index])
    streams.finish()

    assert [streams.ids(name) for name in names] == alone
    shapes = [(len(r["decode"]), len(r["prefill"]), r["unused_budget"]) for r in records_of(trace)[first_record:]]
    assert (num_decoding, len(lengths), 0) in shapes
    assert (num_slots, 0, budget - num_slots) in shapes
    assert_idle_clean(llm)


def test_a_step_of_prompts_alone_fills_the_budget(traced):
    """Every slot prefills in the first iteration, up to the last token of the budget."""
    llm, trace = traced(max_num_batched_tokens=256)
    prompts = random_prompts([32] * 8, seed=5)
    alone = [ids(llm.generate(prompt, greedy(4), use_tqdm=False))[0] for prompt in prompts]
    first_record = len(records_of(trace))
    assert ids(llm.generate(prompts, greedy(4), use_tqdm=False)) == alone
    first = records_of(trace)[first_record]
    assert len(first["prefill"]) == 8 and first["unused_budget"] == 0
    assert_idle_clean(llm)

"""Faults that users of other engines reported with preemption, on the real steps."""

import logging

import pytest

from jaxserve import SamplingParams
from jaxserve.core import Priority, Terms
from jaxserve.engine.validation import make_requests
from tests.engine.conftest import assert_idle_clean, greedy, ids, random_prompts

PAGE, CHUNK, PROMPT = 4, 8, 20

MOMENTS = {
    "before any token": [0],
    "after one token": [1],
    # K/V of the prompt and of all outputs but the last is written.
    "a page is full": [PAGE + 1],
    "a page lacks a token": [PAGE],
    "a page has one token": [PAGE + 2],
    "twice": [3, 9],
}
"""Output tokens of the victim when somebody more urgent comes, once or twice."""


@pytest.fixture(scope="module")
def victim():
    """The prompt of the request that gives way."""
    return random_prompts((PROMPT,), seed=21)[0]


def params_of(kind):
    return greedy(24) if kind == "greedy" else SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)


def one_slot(make_llm, preemption):
    """An engine of one slot, which a request of higher class takes at once; nothing is cached."""
    llm = make_llm(
        max_num_seqs=1,
        page_size=PAGE,
        num_pages=66,
        prefill_chunk=CHUNK,
        priority_preemption=True,
        preemption=preemption,
    )
    llm.engine.reset_prefix_cache()
    return llm


class Streams:
    """Requests of one engine by name, and every delta each has got.

    Attributes:
      deltas: lists by name.
    """

    def __init__(self, llm):
        self.engine = llm.engine
        self.deltas = {}

    def add(self, name, prompt, params, terms=None):
        (request,) = make_requests(
            prompt, params, self.engine.limits, request_id=name, terms=terms or Terms(), draw_seed=lambda: 0
        )
        self.engine.add(request, 0, self.deltas.setdefault(name, []).append)

    def ids(self, name):
        return [token for delta in self.deltas[name] for token in delta.token_ids]

    def finish(self):
        while self.engine.has_work:
            self.engine.step()


def preempt(streams, moments, *, lands):
    """Runs "victim" up to each of `moments` and lets an urgent request take its slot there.

    Args:
      lands: no step is in flight when it comes.
    """
    engine = streams.engine
    for number, count in enumerate(moments):
        engine.step()  # a chunk of the prompt at least
        while len(streams.ids("victim")) < count:
            engine.step()
        if lands:
            engine.land()
        assert engine.scheduler.active_ids == ["victim"]
        streams.add(f"urgent{number}", [7, 8, 9], greedy(3), Terms(priority=Priority.HIGH))
        while not streams.ids(f"urgent{number}"):
            engine.step()


@pytest.mark.parametrize("lands", [True, False], ids=["nothing in flight", "a step in flight"])
@pytest.mark.parametrize("preemption", ["pause", "swap", "recompute"])
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
@pytest.mark.parametrize("moments", MOMENTS.values(), ids=MOMENTS.keys())
def test_pre_1_a_request_preempted_at_any_moment_streams_each_token_once(
    make_llm, victim, kind, moments, preemption, lands
):
    lone = make_llm(max_num_seqs=1, enable_prefix_caching=False)
    alone = lone.generate([victim], params_of(kind), use_tqdm=False)[0]
    llm = one_slot(make_llm, preemption)
    before = llm.engine.scheduler.counters.preemptions
    streams = Streams(llm)
    streams.add("victim", victim, params_of(kind))
    preempt(streams, moments, lands=lands)
    streams.finish()
    assert llm.engine.scheduler.counters.preemptions == before + len(moments)
    # The deltas joined are the answer: nothing twice, nothing missing, one end.
    deltas = streams.deltas["victim"]
    assert streams.ids("victim") == alone.outputs[0].token_ids
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"] and deltas[-1].finish_reason
    assert "".join(delta.text for delta in deltas) == alone.outputs[0].text
    # Its own pages, found again, are no tokens that it was spared.
    assert deltas[-1].num_cached_tokens == alone.num_cached_tokens == 0
    for number in range(len(moments)):
        assert streams.ids(f"urgent{number}") == ids(lone.generate([[7, 8, 9]], greedy(3), use_tqdm=False))[0]
    assert_idle_clean(llm)


@pytest.mark.parametrize("lands", [True, False], ids=["nothing in flight", "a step in flight"])
@pytest.mark.parametrize("preemption", ["pause", "swap", "recompute"])
@pytest.mark.parametrize("moment", [0, 1, 6])
def test_abt_2_a_request_that_was_preempted_may_be_cancelled(make_llm, victim, moment, preemption, lands):
    lone = make_llm(max_num_seqs=1, enable_prefix_caching=False)
    llm = one_slot(make_llm, preemption)
    streams = Streams(llm)
    streams.add("victim", victim, greedy(24))
    preempt(streams, [moment], lands=lands)
    assert llm.engine.scheduler.waiting_ids == ["victim"]
    assert llm.engine.abort("victim") and not llm.engine.abort("victim")
    streams.add("next", victim, greedy(6))
    streams.finish()
    got, end = streams.ids("victim"), streams.deltas["victim"][-1]
    want = ids(lone.generate([victim, [7, 8, 9]], [greedy(24), greedy(3)], use_tqdm=False))
    assert end.finish_reason == "abort" and got == want[0][: len(got)]
    assert streams.ids("urgent0") == want[1] and streams.ids("next") == want[0][:6]
    assert_idle_clean(llm)
    assert llm.engine.scheduler.host_pages_free == llm.engine.runner.scheduler_config.num_host_pages


@pytest.mark.parametrize("reservation", ["guaranteed", "optimistic"])
def test_pre_3_requests_that_each_need_most_of_the_pool_end_and_fill_no_log(make_llm, caplog, reservation):
    preemption = "recompute" if reservation == "optimistic" else "pause"
    llm = make_llm(page_size=4, num_pages=21, max_num_seqs=4, reservation=reservation, preemption=preemption)
    lone = make_llm(max_num_seqs=1, enable_prefix_caching=False)
    prompts = random_prompts((16,) * 20, seed=22)  # 16 and 48 tokens fill 16 of the 20 pages
    counters, stats = llm.engine.scheduler.counters, llm.engine.stats
    before = counters.preemptions, stats.iterations, stats.slot_steps
    with caplog.at_level(logging.DEBUG, "jaxserve"):
        outputs = llm.generate(prompts, greedy(48), use_tqdm=False)
    assert ids(outputs) == ids(lone.generate(prompts, greedy(48), use_tqdm=False))
    preempted = counters.preemptions - before[0]
    assert (preempted > 0) == (reservation == "optimistic") and preempted <= 3 * len(prompts)
    assert stats.slot_steps - before[2] >= stats.iterations - before[1] > 0, "an iteration without a row"
    assert len([each for each in caplog.records if each.name.startswith("jaxserve")]) < 10 * len(prompts)
    assert_idle_clean(llm)

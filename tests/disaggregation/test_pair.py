"""Two engines joined over a connection: outputs are those of one engine, whatever happens between them."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.core import RejectedError, SamplingParams, StructuredOutputs, Submission
from jaxserve.disaggregation import remote_prefill
from jaxserve.disaggregation.kv_layout import KVLayout
from jaxserve.disaggregation.pull import Puller, PullError, Wanted
from jaxserve.disaggregation.remote_prefill import AVOID_S
from jaxserve.engine import AsyncEngine
from jaxserve.runtime import COMPILES
from jaxserve.testing.tiny_lora import write_tiny_lora
from tests.disaggregation.cutting_proxy import CuttingProxy
from tests.disaggregation.pair import GREEDY, PAGE, Pair, make_engine, prompts, pull_raw
from tests.models.tiny_models import FOLDER
from tests.server.running import until


def both(pair: Pair, wanted: list[list[int]], params: SamplingParams) -> tuple[list[list[int]], list[list[int]]]:
    """Outputs with prompts computed here, and there."""
    here = pair.generate(wanted, params, remotely=False)
    pair.decode.reset_prefix_cache()
    return here, pair.generate(wanted, params)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(max_tokens=12, temperature=1.0, seed=7, n=2, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.7, seed=3, top_p=0.9, logprobs=2, min_tokens=2),
        SamplingParams(max_tokens=12, temperature=0, structured_outputs=StructuredOutputs(regex="[a-f]{3,9}")),
        SamplingParams(max_tokens=12, temperature=0, repetition_penalty=1.5, presence_penalty=0.5),
    ],
    ids=["greedy", "seeded_choices", "logprobs", "grammar", "penalties"],
)
def test_outputs_are_those_of_one_engine_and_nothing_compiles(pair: Pair, params: SamplingParams) -> None:
    pulls, compiled = pair.count("kv_transfer_pulls_total"), COMPILES.count
    here, there = both(pair, prompts(1), params)
    assert here == there
    assert pair.count("kv_transfer_pulls_total") - pulls == 6
    assert COMPILES.count == compiled


def test_what_moves_is_the_pages_of_all_but_the_last_token(pair: Pair) -> None:
    page_bytes = KVLayout.of(pair.decode.engine).page_bytes
    assert page_bytes == pair.decode.engine.runner.page_bytes
    counts = [pair.count(f"kv_transfer_{name}_total") for name in ("bytes", "tokens")]
    # 40 tokens: the last page's token is computed here, so 9 pages come; 41: 10.
    pair.generate(prompts(2, (40, 41)), GREEDY)
    assert pair.count("kv_transfer_bytes_total") - counts[0] == 19 * page_bytes
    assert pair.count("kv_transfer_tokens_total") - counts[1] == 19 * PAGE


@pytest.mark.parametrize("pair", [{"remote": {"min_tokens": 20}}], indirect=True)
def test_short_cached_and_scored_prompts_are_computed_here(pair: Pair) -> None:
    def local(reason: str) -> float:
        return pair.count("local_prefills_total", reason=reason)

    before = {reason: local(reason) for reason in ("short", "cached", "scores")}
    (long,) = prompts(3, (60,))
    pair.generate([long[:19], long[:23], long], GREEDY)
    pair.generate([long], GREEDY)
    pair.generate([prompts(4, (60,))[0]], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert {reason: local(reason) - count for reason, count in before.items()} == {"short": 1, "cached": 1, "scores": 1}


def test_the_time_elsewhere_is_part_of_the_first_token_s(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Puller.pull

    def slower(*arguments: Any, **others: Any) -> Any:
        time.sleep(0.3)
        return slow(*arguments, **others)

    monkeypatch.setattr(Puller, "pull", slower)
    registry = pair.decode.metrics.registry
    labels = {"model_name": pair.decode.model_name, "engine": "0"}
    name = "jaxserve:time_to_first_token_seconds_sum"
    before = registry.get_sample_value(name, labels) or 0.0
    pair.generate(prompts(5, (40,)), GREEDY)
    after = registry.get_sample_value(name, labels)
    assert after is not None and after - before > 0.3


@pytest.mark.parametrize("num_bytes", [2000, 9000, 20000])
def test_a_connection_that_is_cut_goes_on_where_it_was(pair: Pair, num_bytes: int) -> None:
    (prompt,) = prompts(6, (64,))
    whole = pull_raw(pair, prompt)
    pair.prefill.reset_prefix_cache()
    until(lambda: not len(pair.server._exports), 10, "the first export is gone")
    proxy = CuttingProxy(pair.server.port, num_bytes, 1)
    resumed: list[None] = []
    puller = Puller(("127.0.0.1", proxy.port), KVLayout.of(pair.decode.engine), "")
    again = puller.pull(Wanted("raw", tuple(prompt)), 20.0, threading.Event(), lambda: resumed.append(None))
    proxy.close()
    assert len(resumed) == proxy.num_connections - 1 >= 1
    assert [(b.group, b.first, b.count) for b in again] == [(b.group, b.first, b.count) for b in whole]
    for one, other in zip(again, whole, strict=True):
        for leaf, same in zip(one.leaves, other.leaves, strict=True):
            np.testing.assert_array_equal(leaf, same[:, : one.count])


@pytest.mark.parametrize("fallback", [True, False])
def test_a_prefill_server_that_dies_amid_its_pages(engines: tuple[AsyncEngine, AsyncEngine], fallback: bool) -> None:
    """Every connection is cut in the middle of the pages; then the prompt is computed here, or refused."""
    through = Pair(*engines)
    proxy = CuttingProxy(through.server.port, 9000, 1000)
    pair = Pair(*engines, remote={"workers": (("127.0.0.1", proxy.port),), "fallback": fallback})
    wanted = prompts(7, (64,))
    before = {reason: pair.count("local_prefills_total", reason=reason) for reason in ("unreachable", "no_worker")}
    if fallback:
        here, there = both(pair, wanted, GREEDY)
        assert here == there
        # It is left alone for a while: the next prompt does not wait for it.
        assert proxy.num_connections == 4
        pair.remote._workers[0].avoid_until += 1000
        pair.generate(prompts(8, (64,)), GREEDY)
        assert proxy.num_connections == 4
    else:
        with pytest.raises(RejectedError, match="no prefill server computed the prompt") as caught:
            pair.generate(wanted, GREEDY)
        assert caught.value.rejection.reason == "prefill_unavailable"
        assert caught.value.rejection.retry_after_s == AVOID_S
    after = {reason: pair.count("local_prefills_total", reason=reason) - count for reason, count in before.items()}
    assert after == {"unreachable": fallback, "no_worker": fallback}
    assert pair.remote._num_bytes == 0
    for each in (pair, through):
        each.close()
    proxy.close()
    pair.decode.reset_prefix_cache()


def test_the_next_prefill_server_is_tried(engines: tuple[AsyncEngine, AsyncEngine]) -> None:
    first = Pair(*engines)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        dead = unused.getsockname()[1]
    pair = Pair(*engines, remote={"workers": (("127.0.0.1", dead), ("127.0.0.1", first.server.port))})
    pulls = pair.count("kv_transfer_pulls_total")
    for seed in range(4):  # of which about half would go to the dead one first
        pair.generate(prompts(20 + seed, (40,)), GREEDY)
    assert pair.count("kv_transfer_pulls_total") - pulls == 4
    first.close()
    pair.close()
    pair.decode.reset_prefix_cache()


@pytest.mark.parametrize(
    ("pair", "reason"),
    [({"server": {"max_bytes": 100}}, "refused"), ({"remote": {"max_bytes": 100}}, "no_space")],
    indirect=["pair"],
)
def test_pages_beyond_the_bound_are_not_sent(pair: Pair, reason: str) -> None:
    before = pair.count("local_prefills_total", reason=reason)
    here, there = both(pair, prompts(9, (40, 61)), GREEDY)
    assert here == there
    assert pair.count("local_prefills_total", reason=reason) - before == 2


def test_who_goes_away_while_pages_come_leaves_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coroutine that waits is cancelled; the pages that came anyway are forgotten."""
    began, go_on = threading.Event(), threading.Event()
    pull = Puller.pull

    def slow(*arguments: Any, **others: Any) -> Any:
        began.set()
        assert go_on.wait(600)
        return pull(*arguments, **others)

    monkeypatch.setattr(Puller, "pull", slow)

    async def run() -> None:
        submissions = [Submission(prompt, GREEDY, f"gone-{len(prompt)}") for prompt in prompts(16, (40, 41))]
        task = asyncio.create_task(pair.remote.fetch(submissions))
        await asyncio.to_thread(began.wait, 600)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert pair.remote._num_bytes > 0
    go_on.set()
    until(lambda: pair.remote._num_bytes == 0, 60, "the bytes are given back")


def test_nobody_is_asked_for_what_the_engine_refuses(pair: Pair) -> None:
    pulls = pair.count("kv_transfer_pulls_total")

    async def run() -> None:
        submission = Submission(prompts(17, (40,))[0], SamplingParams(max_tokens=90), "too-long")
        fetched = await pair.remote.fetch([submission])
        assert fetched == [submission]
        with pytest.raises(ValueError, match="together they must be at most"):
            pair.decode.submit_all(fetched)

    asyncio.run(run())
    assert pair.count("kv_transfer_pulls_total") == pulls


def test_pages_that_are_not_taken_are_forgotten(pair: Pair) -> None:
    async def run() -> None:
        fetched = await pair.remote.fetch([Submission(prompts(17, (40,))[0], GREEDY, "not-taken")])
        assert fetched[0].kv is not None and pair.remote._num_bytes > 0
        pair.remote.release(fetched)

    asyncio.run(run())
    assert pair.remote._num_bytes == 0


def test_pages_that_the_prefix_cache_has_by_now_are_forgotten_at_once(pair: Pair) -> None:
    async def run() -> None:
        (prompt,) = prompts(34, (40,))
        fetched = await pair.remote.fetch([Submission(prompt, GREEDY, name) for name in ("one", "two")])
        assert all(each.kv is not None for each in fetched)
        (first,) = pair.decode.submit_all(fetched[:1])
        await first.collect()
        assert pair.remote._num_bytes > 0
        (second,) = pair.decode.submit_all(fetched[1:])
        async for delta in second:
            assert delta.finish_reason is None and pair.remote._num_bytes == 0
            break
        second.cancel()

    asyncio.run(run())


def test_who_stops_gives_up_what_is_being_fetched(
    engines: tuple[AsyncEngine, AsyncEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(*engines)
    began = threading.Event()

    def slow(self: Puller, wanted: Wanted, left: float, cancelled: threading.Event, on_resume: Any) -> Any:
        began.set()
        assert cancelled.wait(600)
        raise PullError("timeout", "nobody waits for it any more")

    monkeypatch.setattr(Puller, "pull", slow)

    async def run() -> None:
        submission = Submission(prompts(35, (40,))[0], GREEDY, "stopped")
        fetching = asyncio.create_task(pair.remote.fetch([submission]))
        await asyncio.to_thread(began.wait, 600)
        pair.remote.stop()
        (fetched,) = await fetching
        assert fetched.kv is None
        assert await pair.remote.fetch([submission]) == [submission]

    asyncio.run(run())
    assert pair.remote._num_bytes == pair.remote._num_pulls == len(pair.remote._cancels) == 0
    pair.close()


@pytest.mark.parametrize("pair", [{"remote": {"fallback": False}}], indirect=True)
def test_without_fallback_one_too_many_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_prefill, "MAX_PULLS", 0)
    before = pair.count("requests_offered_total")
    # The second prompt is too short to be asked for: it is refused with the first, and each choice counts.
    with pytest.raises(RejectedError, match="0 prompts are being computed") as caught:
        pair.generate(prompts(36, (40, 3)), replace(GREEDY, n=2))
    assert caught.value.rejection.reason == "prefill_unavailable"
    assert pair.count("requests_rejected_total", reason="prefill_unavailable") >= 4
    assert pair.count("requests_offered_total") - before == 4


def test_an_adapter_that_is_not_loaded_is_refused_and_counted_once(pair: Pair) -> None:
    before = pair.count("requests_offered_total")
    with pytest.raises(RejectedError, match="is not loaded"):
        pair.generate(prompts(37, (40, 3)), replace(GREEDY, n=2), adapter="none")
    assert pair.count("requests_offered_total") - before == 4


def test_a_server_that_fails_again_is_left_alone_longer() -> None:
    worker = remote_prefill._Worker(Puller(("127.0.0.1", 1), KVLayout("", "", 4, (0,), ()), ""))
    now, waits = 100.0, []
    for _ in range(6):
        worker.avoid(now)
        worker.avoid(now)  # another prompt, asked at the same time
        waits.append(worker.avoid_until - now)
        now = worker.avoid_until
    assert waits == [5, 10, 20, 40, 60, 60]
    worker.trust()
    worker.avoid(now)
    assert worker.avoid_until - now == 5


@pytest.mark.parametrize("pair", [{"server": {"transport": "jax"}, "remote": {"transport": "jax"}}], indirect=True)
def test_pages_go_by_jax_s_own_transfer(pair: Pair) -> None:
    pulls = pair.count("kv_transfer_pulls_total")
    here, there = both(pair, prompts(18), GREEDY)
    assert here == there and pair.count("kv_transfer_pulls_total") - pulls == 6


@pytest.mark.parametrize("pair", [{"server": {"transport": "stream"}, "remote": {"transport": "jax"}}], indirect=True)
def test_two_ways_are_no_way(pair: Pair) -> None:
    before = pair.count("local_prefills_total", reason="protocol")
    here, there = both(pair, prompts(19, (40,)), GREEDY)
    assert here == there and pair.count("local_prefills_total", reason="protocol") - before == 1


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gemma3_dual_rope", {}),  # windows: layers in groups, of which only what is seen moves
        ("qwen3_moe", {"enable_prefix_caching": False}),
        ("deepseek_v3_mla", {"max_num_batched_tokens": 16, "prefill_buckets": (16,)}),  # latent rows
        ("llama_gqa_tied", {"kv_cache_dtype": "int8", "preemption": "swap", "swap_space": 0.01}),
    ],
)
def test_so_it_is_for_every_kind_of_pool(name: str, settings: dict[str, Any]) -> None:
    path = str(FOLDER / name)
    made = [make_engine(path, role, skip_tokenizer_init=True, **settings) for role in ("prefill", "decode")]
    pair = Pair(*made)
    vocab_size = made[1].engine.limits.vocab_size
    for params in (GREEDY, SamplingParams(max_tokens=8, temperature=1.0, seed=5, n=2, ignore_eos=True)):
        wanted = prompts(30, (9, 40, 61, 33), vocab_size)
        here = pair.generate(wanted, params, remotely=False)
        for engine in made:  # what nobody wrote or brought is not read
            until(lambda engine=engine: not engine.engine.has_work, 60, "the last step has landed")
            engine.reset_prefix_cache()
            engine.engine.runner.fill_pool(float("nan"))
        assert pair.generate(wanted, params) == here
        until(lambda: not made[1].engine.has_work, 60, "the last step has landed")
        made[1].reset_prefix_cache()
    assert pair.count("kv_transfer_pulls_total") == 8
    pair.close()
    for engine in made:
        engine.shutdown()


def test_an_adapter_is_found_by_its_name(tiny_model_dir: Path, tmp_path: Path) -> None:
    write_tiny_lora(tmp_path / "sql", tiny_model_dir)
    lora = {"enable_lora": True, "max_loras": 1, "lora_modules": (f"sql={tmp_path}/sql",)}
    made = [make_engine(str(tiny_model_dir), role, **lora) for role in ("prefill", "decode")]
    pair = Pair(*made)
    wanted = prompts(32, (40,))
    base = pair.generate(wanted, GREEDY, remotely=False)
    here = pair.generate(wanted, GREEDY, remotely=False, adapter="sql")
    pair.decode.reset_prefix_cache()
    assert pair.generate(wanted, GREEDY, adapter="sql") == here != base
    # Its pages are found under the adapter alone.
    assert pair.generate(wanted, GREEDY) == base
    assert pair.count("kv_transfer_pulls_total") == 2
    pair.close()
    for engine in made:
        engine.shutdown()


def test_pages_of_another_model_are_refused(engines: tuple[AsyncEngine, AsyncEngine]) -> None:
    assert KVLayout.of(engines[1].engine) == KVLayout.of(engines[0].engine)
    other = make_engine(str(FOLDER / "llama_gqa_tied"), "prefill", skip_tokenizer_init=True)
    pair = Pair(other, engines[1])
    before = pair.count("local_prefills_total", reason="layout")
    here, there = both(pair, prompts(31, (40,)), GREEDY)
    assert here == there and pair.count("local_prefills_total", reason="layout") - before == 1
    pair.close()
    other.shutdown()
    engines[1].reset_prefix_cache()

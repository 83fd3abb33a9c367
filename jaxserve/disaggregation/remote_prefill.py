"""RemotePrefill: a decode server's side of disaggregation: which prompts others compute, and what if they do not.

    fetch(submission) ──▶ short, cached, scored ─────────────────────────────▶ as it is: computed here
                     └──▶ a prefill server computes all full pages but the last token's ──▶ submission with their K/V
                                └── none can ──▶ as it is, counted and logged; or a refusal, without local fallback

What is left of the prompt, at most a page, is an ordinary chunk here: it samples the first token. So sampling,
grammars, log-probabilities and stops are the decode server's alone, and nothing but token ids and K/V moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from absl import logging

from jaxserve.core import RejectedError, Rejection, Submission
from jaxserve.disaggregation.kv_layout import KVLayout
from jaxserve.disaggregation.metrics import DecodeMetrics
from jaxserve.disaggregation.pull import Puller, PullError, Wanted
from jaxserve.disaggregation.transports import receiver
from jaxserve.engine import AsyncEngine
from jaxserve.engine.validation import check_num_choices
from jaxserve.runtime import PageBlock, PageSource

MAX_PULLS = 64
"""Prompts that others compute at once; more are computed here."""
AVOID_S, MAX_AVOID_S = 5.0, 60.0
"""Seconds that a prefill server that could not be reached is not asked again; twice as many after each failure."""
LOG_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class RemotePrefillSettings:
    """Whom to ask, and for what.

    Attributes:
      workers: host and port of each prefill server.
      token: shared with them; "": none.
      min_tokens: prompts with fewer tokens to compute are computed here.
      timeout_s: most seconds that a prefill server gets for one prompt.
      fallback: what no prefill server computes is computed here; else it is refused.
      max_bytes: of pages that have come, or are about to, and are not in the pool yet.
      host: this side's address, for the transport "jax".
      transport: "stream", "jax" or "auto".
    """

    workers: tuple[tuple[str, int], ...]
    token: str = field(default="", repr=False)
    min_tokens: int = 256
    timeout_s: float = 30.0
    fallback: bool = True
    max_bytes: int = 1 << 30
    host: str = "127.0.0.1"
    transport: str = "auto"


class _Worker:
    """A prefill server as it was last seen."""

    def __init__(self, puller: Puller) -> None:
        self.puller = puller
        self.num_pulls = 0
        self.avoid_s = AVOID_S
        self.avoid_until = 0.0

    def avoid(self, now: float) -> None:
        """It failed: others are asked for a while. What failed at once, of prompts asked together, counts once."""
        if now >= self.avoid_until:
            self.avoid_until = now + self.avoid_s
            self.avoid_s = min(self.avoid_s * 2, MAX_AVOID_S)

    def trust(self) -> None:
        """It did what it was asked."""
        self.avoid_s, self.avoid_until = AVOID_S, 0.0


class RemotePrefill:
    """Asks prefill servers.

    Args:
      settings: see `RemotePrefillSettings`.
    """

    def __init__(self, settings: RemotePrefillSettings) -> None:
        self._settings = settings
        self._threads = ThreadPoolExecutor(MAX_PULLS, thread_name_prefix="kv-pull")
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._num_pulls = 0
        self._closing = threading.Event()
        self._cancels: set[threading.Event] = set()  # of the pulls that run
        self._engine: AsyncEngine | None = None

    def start(self, engine: AsyncEngine, metrics: DecodeMetrics | None = None) -> None:
        """Begins to ask, for a ready engine; before, `fetch` leaves everything as it is.

        Args:
          metrics: None: they are made, which an engine's registry allows once.

        Raises:
          ValueError: the transport cannot be had.
        """
        settings = self._settings
        self._layout = KVLayout.of(engine.engine)
        self._metrics = metrics or DecodeMetrics(engine.metrics.registry, engine.model_name)
        pull = receiver(settings.transport, settings.host, engine.engine.runner.kv_layout)
        self._workers = [_Worker(Puller(address, self._layout, settings.token, pull)) for address in settings.workers]
        self._engine = engine

    def stop(self) -> None:
        """Gives up what is being fetched; from now on `fetch` leaves everything as it is."""
        self._closing.set()
        with self._lock:
            for cancelled in self._cancels:
                cancelled.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def fetch(self, submissions: Sequence[Submission]) -> list[Submission]:
        """The submissions, with K/V of their prompts where a prefill server computed it.

        Nobody is asked for what the engine will refuse.

        Raises:
          RejectedError: none could, and nothing is computed here instead.
        """
        if self._engine is None or self._closing.is_set() or not _is_valid(self._engine, submissions):
            return list(submissions)
        tasks = [asyncio.create_task(self._fetch(self._engine, each)) for each in submissions]
        try:
            await asyncio.wait(tasks)
            with self._engine.metrics.counting_refusals(sum(each.params.n for each in submissions)):
                return [task.result() for task in tasks]
        except BaseException:
            for task in tasks:
                task.cancel()
                task.add_done_callback(
                    lambda task: task.cancelled() or task.exception() or self.release([task.result()])
                )
            raise

    def release(self, submissions: Sequence[Submission]) -> None:
        """The engine has not taken them: their pages are forgotten."""
        for submission in submissions:
            if isinstance(submission.kv, PageSource):
                submission.kv.release()

    async def _fetch(self, engine: AsyncEngine, submission: Submission) -> Submission:
        size = self._layout.page_size
        num_tokens = (len(submission.prompt_token_ids) - 1) // size * size
        if (reason := self._local_reason(engine, submission, num_tokens)) is not None:
            if reason == "busy" and not self._settings.fallback:
                raise self._unavailable(f"{MAX_PULLS} prompts are being computed by prefill servers")
            if reason:
                self._metrics.local(reason)
            return submission
        received_at, cancelled = time.monotonic(), threading.Event()
        with self._lock:
            self._num_pulls += 1
            self._cancels.add(cancelled)
            if self._closing.is_set():
                cancelled.set()
        future = self._threads.submit(self._pull, engine, submission, num_tokens, received_at, cancelled)
        try:
            source = await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            cancelled.set()
            future.add_done_callback(_release)
            raise
        except PullError as error:
            if not self._settings.fallback:
                raise self._unavailable(str(error)) from error
            self._metrics.local(error.reason)
            return replace(submission, received_at=received_at)
        finally:
            with self._lock:
                self._num_pulls -= 1
                self._cancels.discard(cancelled)
        return replace(submission, kv=source, received_at=received_at)

    def _unavailable(self, why: str) -> RejectedError:
        message = f"no prefill server computed the prompt: {why}"
        wait_s = min(worker.avoid_until for worker in self._workers) - time.monotonic()
        return RejectedError(Rejection("prefill_unavailable", message, retry_after_s=max(wait_s, AVOID_S)))

    def _local_reason(self, engine: AsyncEngine, submission: Submission, num_tokens: int) -> str | None:
        """Why a prompt is computed here without asking anybody; "": the engine will refuse it; None: it is not."""
        least = max(self._settings.min_tokens, 1)
        if engine.load.waiting >= engine.config.max_queue_requests > 0:
            return ""
        if submission.params.prompt_logprobs is not None:
            return "scores"
        if num_tokens < least:
            return "short"
        if num_tokens - engine.engine.num_cached_tokens(submission) < least:
            return "cached"
        with self._lock:
            return "busy" if self._num_pulls >= MAX_PULLS else None

    def _pull(
        self,
        engine: AsyncEngine,
        submission: Submission,
        num_tokens: int,
        received_at: float,
        cancelled: threading.Event,
    ) -> PageSource:
        """The pages of a prompt's first `num_tokens`, of the first prefill server that computes them.

        Raises:
          PullError: none does; for the last one's reason.
        """
        num_bytes = self._layout.num_pages(num_tokens) * self._layout.page_bytes
        with self._lock:
            if self._num_bytes + num_bytes > self._settings.max_bytes:
                raise PullError("no_space", f"{num_bytes} bytes of pages beside {self._num_bytes} exceed the limit")
            self._num_bytes += num_bytes
        try:
            blocks = self._pull_from_any(self._wanted(engine, submission, num_tokens, received_at), cancelled)
        except BaseException:
            self._give_back(num_bytes)
            raise
        self._metrics.pulls.inc()
        self._metrics.tokens.inc(num_tokens)
        self._metrics.num_bytes.inc(num_bytes)
        self._metrics.seconds.observe(time.monotonic() - received_at)
        return PageSource(num_tokens, blocks, lambda: self._give_back(num_bytes))

    def _pull_from_any(self, wanted: Wanted, cancelled: threading.Event) -> list[PageBlock]:
        error = PullError("no_worker", "every prefill server failed a moment ago")
        ends_at = time.monotonic() + self._settings.timeout_s
        for worker in self._order(wanted.prompt):
            with self._lock:
                worker.num_pulls += 1
            try:
                left = ends_at - time.monotonic()
                blocks = worker.puller.pull(wanted, left, cancelled, self._metrics.resumed.inc)
                worker.trust()
                return blocks
            except PullError as failure:
                error = failure
                self._metrics.failed(failure.reason)
                if failure.reason in ("unreachable", "protocol", "layout", "token"):
                    worker.avoid(time.monotonic())
                logging.log_every_n_seconds(logging.WARNING, "%s", LOG_EVERY_S, failure)
                if cancelled.is_set() or self._closing.is_set() or failure.reason == "timeout":
                    break
            finally:
                with self._lock:
                    worker.num_pulls -= 1
        raise error

    def _order(self, prompt: tuple[int, ...]) -> list[_Worker]:
        """Those that may be asked: the least busy first, ties by the prompt's beginning, which may be cached there."""
        now, count = time.monotonic(), len(self._workers)
        start = zlib.crc32(repr(prompt[: self._layout.page_size]).encode()) % count
        turned = [self._workers[(start + index) % count] for index in range(count)]
        return sorted((each for each in turned if each.avoid_until <= now), key=lambda each: each.num_pulls)

    def _wanted(self, engine: AsyncEngine, submission: Submission, num_tokens: int, received_at: float) -> Wanted:
        terms, params = submission.terms, engine.config.service_classes
        service_class = next((each for each in params if each.name == terms.service_class), None)
        priority, deadline_s = terms.priority, terms.deadline_s
        if service_class is not None:
            priority = service_class.priority if priority is None else priority
            deadline_s = service_class.deadline_s if deadline_s is None else deadline_s
        if deadline_s is not None:
            deadline_s = float(deadline_s) - (time.monotonic() - received_at)
        return Wanted(
            submission.request_id,
            tuple(submission.prompt_token_ids[:num_tokens]),
            adapter=submission.adapter,
            priority=priority,
            deadline_s=deadline_s,
            tenant=terms.tenant,
            cache_salt=terms.cache_salt,
            traceparent=terms.traceparent,
        )

    def _give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes -= num_bytes


def _is_valid(engine: AsyncEngine, submissions: Sequence[Submission]) -> bool:
    """Whether the engine would take them, as far as they alone tell; if not, it says why when it gets them."""
    now = time.monotonic()
    try:
        check_num_choices(submissions, engine.max_choices)
        for each in submissions:
            seed = 0 if each.params.seed is None else each.params.seed  # else the engine would draw one
            engine.engine.make_requests(replace(each, params=replace(each.params, seed=seed)), now)
    except (ValueError, RejectedError):
        return False
    return True


def _release(future: Future[PageSource]) -> None:
    with contextlib.suppress(BaseException):
        future.result().release()

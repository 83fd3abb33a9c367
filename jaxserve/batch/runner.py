"""BatchRunner: keeps a window of lines in progress until all are written.

    read -> begin -> collect -> write
         └──────── window ─────────┘

Lines are begun one after another in the input's order, so the engine sees the same arrivals in every run; they end in
any order. Never more than `window` lines are between reading and writing, so memory does not grow with the file. A
full queue is no error here: the line at hand waits until another one ends. Nor is an engine whose lock somebody holds
for long: while the watchdog says that it is ready, the line is tried again. Work that a stop or a dead engine cuts
short leaves no trace in the output, so a rerun does it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

from jaxserve.batch.records import RequestLine, Result, answered, refused
from jaxserve.server.chat import begin_chat_completion
from jaxserve.server.completions import begin_completion
from jaxserve.server.errors import ApiError, to_api_error
from jaxserve.server.responses import begin_response
from jaxserve.server.service import GenerationService
from jaxserve.server.streaming import Answer, collect

_ROUTES = {
    "/v1/chat/completions": begin_chat_completion,
    "/v1/completions": begin_completion,
    "/v1/responses": begin_response,
}
HELD_PERIOD_S = 0.05
"""Between two tries of a line while the engine's lock is held."""
_NO_HEADERS: Mapping[str, str] = {}


class EngineStoppedError(Exception):
    """The engine takes no requests any more."""


class BatchRunner:
    """Answers lines.

    Args:
      service: over an engine that is ready.
      write: takes each result once, in the order they belong in.
      window: most lines in progress.
      in_order: results are written in the order of their lines, so later ones wait for earlier ones.
    """

    def __init__(
        self, service: GenerationService, write: Callable[[Result], None], window: int, in_order: bool
    ) -> None:
        self._service = service
        self._write = write
        self._in_order = in_order
        self._window = asyncio.Semaphore(window)
        self._held: dict[int, Result] = {}  # by place, behind a result that is not there yet
        self._next_place = 0
        self._num_running = 0
        self._one_ended = asyncio.Event()
        self._feeder: asyncio.Task[None] | None = None
        self._lines: set[asyncio.Task[None]] = set()

    async def run(self, lines: Iterator[RequestLine]) -> None:
        """Answers every line, or fewer after `stop`.

        Raises:
          EngineStoppedError: the engine is dead.
          OSError, ResultFileError: of reading and writing.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._feeder = group.create_task(self._feed(lines, group))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def stop(self, grace_s: float) -> None:
        """Begins no more lines; those in progress may end within `grace_s`, then they are aborted."""
        if self._feeder is not None:
            self._feeder.cancel()
        asyncio.get_running_loop().call_later(grace_s, self._abort)

    def _abort(self) -> None:
        for task in list(self._lines):
            task.cancel()

    async def _feed(self, lines: Iterator[RequestLine], group: asyncio.TaskGroup) -> None:
        for place, line in enumerate(lines):
            await self._window.acquire()
            if line.error is not None:
                self._put(place, Result(line.number, line.custom_id, None, line.error))
            else:
                try:
                    answer = await self._begin(line)
                except ApiError as error:
                    self._put(place, refused(line, error))
                else:
                    task = group.create_task(self._finish(place, line, answer))
                    self._lines.add(task)
                    task.add_done_callback(self._lines.discard)
            await asyncio.sleep(0)  # signals and streams have their turn, however many lines are bad

    async def _begin(self, line: RequestLine) -> Answer:
        """Submits a line, when the queue has room for it; without anybody to wait for, a refusal is the answer.

        Raises:
          ApiError: the request is refused.
          EngineStoppedError: no request is taken any more.
        """
        while True:
            self._one_ended.clear()
            try:
                answer = await _ROUTES[line.url](self._service, line.body, _NO_HEADERS)
            except Exception as exc:
                if to_api_error(exc).code == "engine_stuck" and self._service.engine.state == "ready":
                    await asyncio.sleep(HELD_PERIOD_S)
                    continue
                error = self._error(exc)
                if error.kind != "overloaded" or not self._num_running:
                    raise error from None
            else:
                self._num_running += 1
                return answer
            await self._one_ended.wait()

    async def _finish(self, place: int, line: RequestLine, answer: Answer) -> None:
        """Waits for the outputs of a line that has begun."""
        while True:
            try:
                result = answered(line, answer.request_id, answer.whole(await collect(answer.streams)))
                break
            except Exception as exc:
                error = self._error(exc)
            finally:
                self._num_running -= 1
                self._one_ended.set()
            try:
                if error.kind != "overloaded":
                    raise error
                answer = await self._begin(line)  # it was displaced while it waited
            except ApiError as refusal:
                result = refused(line, refusal)
                break
        self._put(place, result)

    def _error(self, exc: Exception) -> ApiError:
        """The line's error; raises EngineStoppedError where the fault is not the line's."""
        error = to_api_error(exc)
        if error.kind == "unavailable":
            raise EngineStoppedError(error.message) from None
        return error

    def _put(self, place: int, result: Result) -> None:
        """Writes a result, or holds it until those before it are written."""
        if not self._in_order:
            self._write_now(result)
            return
        self._held[place] = result
        while self._next_place in self._held:
            self._write_now(self._held.pop(self._next_place))
            self._next_place += 1

    def _write_now(self, result: Result) -> None:
        self._write(result)
        self._window.release()

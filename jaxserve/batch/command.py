"""Runs a job on an engine, from loading to the last line, under signals.

    load -> lines -> summary

First SIGINT or SIGTERM: no line is begun any more, those in progress get `drain_grace_s`; the rest is for a rerun.
Second signal: the process ends at once. Whatever happens, the output is whole lines.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading

from jaxserve.batch.console import BatchDisplay
from jaxserve.batch.job import BatchJob
from jaxserve.batch.records import Result
from jaxserve.batch.result_file import ResultFileError
from jaxserve.batch.runner import BatchRunner, EngineStoppedError
from jaxserve.server.console import StartupDisplay
from jaxserve.server.engine_api import EngineApi
from jaxserve.server.process import flush_and_exit, wait_until_ready
from jaxserve.server.service import GenerationService

EXIT_FAILED = 1
EXIT_LINES_FAILED = 3


class BatchCommand:
    """One run of a job.

    Args:
      engine: not started yet.
      job: with lines left to do.
      startup, display: what the operator sees while it loads, and then.
      trace_file: of the engine, for the summary.
    """

    def __init__(
        self,
        engine: EngineApi,
        job: BatchJob,
        startup: StartupDisplay,
        display: BatchDisplay,
        trace_file: str | None = None,
    ) -> None:
        self._engine = engine
        self._job = job
        self._startup = startup
        self._display = display
        self._trace_file = trace_file
        self._signal = 0
        self._stop = asyncio.Event()
        self._runner: BatchRunner | None = None

    async def run(self) -> int:
        """Runs to the end or to a signal.

        Returns:
          The exit status: see `docs/batch.md`.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        self._engine.start()
        ready = await wait_until_ready(self._engine, self._stop)
        self._startup.close()
        if not ready:
            if self._engine.error is not None:
                return _failed(f"the engine did not start: {self._engine.error}")
            # Loading or compiling cannot be interrupted, and no line has begun.
            flush_and_exit(128 + self._signal)
        status = await self._answer_lines()
        summary = self._display.summary(str(self._job.results.path), self._trace_file)
        await asyncio.to_thread(self._engine.shutdown)
        print("\n".join(summary))
        if any(thread.name == "engine" for thread in threading.enumerate()):
            flush_and_exit(status)
        return status

    async def _answer_lines(self) -> int:
        settings = self._job.settings
        service = GenerationService(self._engine, settings.tool_call_parser)
        self._runner = BatchRunner(service, self._write, settings.window, settings.in_order)
        self._display.begin()
        ticker = asyncio.create_task(self._tick())
        try:
            await self._runner.run(self._job.pending())
            self._job.results.close()
        except (EngineStoppedError, ResultFileError, OSError) as error:
            return _failed(f"{error}; what is written is whole: the same command goes on there")
        finally:
            ticker.cancel()
            self._display.close()
            service.close()
        if self._signal and self._job.tally.num_left:
            return 128 + self._signal
        return exit_status(self._job)

    def _write(self, result: Result) -> None:
        self._job.results.append(result.encode())
        self._job.tally.add(result)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._display.period_s)
            self._display.update()

    def _signalled(self, number: int) -> None:
        if self._signal:
            os._exit(128 + number)
        self._signal = number
        self._stop.set()
        if self._runner is not None:
            grace_s = self._job.settings.drain_grace_s
            self._display.note(f"stopping: lines in progress have {grace_s:g} s; a second signal ends now")
            self._runner.stop(grace_s)


def exit_status(job: BatchJob) -> int:
    """Of a run that got to the end of its input."""
    failed = job.tally.num_failed + job.tally.num_earlier_failed
    return EXIT_LINES_FAILED if failed and job.settings.fail_on_error else 0


def _failed(message: str) -> int:
    print(f"jaxserve: {message}", file=sys.stderr)
    return EXIT_FAILED

"""`python -m jaxserve.batch`: answers a file of requests."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl.flags import FlagValues

from jaxserve.batch.console import BatchDisplay, summary_lines
from jaxserve.batch.job import BatchJob, BatchSettings
from jaxserve.batch.tally import EngineFigures
from jaxserve.config import EngineConfig
from jaxserve.config.flags import engine_config_from_flags, exit_with, follow_fault_plan, parse_flags


def main(argv: Sequence[str]) -> int:
    """Parses flags, looks at the files, and answers what is left.

    Returns:
      The exit status: see `docs/batch.md`.

    Raises:
      SystemExit: 2, on a bad flag or file.
    """
    flags = parse_flags("batch", argv)
    config = engine_config_from_flags(flags)
    follow_fault_plan(flags)
    try:
        job = BatchJob(_settings(flags, config))
    except (OSError, ValueError) as error:
        exit_with(str(error))
    except KeyboardInterrupt:  # a large input takes seconds to look through
        return 128 + signal.SIGINT
    for note in job.notes:
        print(note, file=sys.stderr)
    # Imported after the files are checked: jax takes seconds, a mistyped name should not.
    from jaxserve.batch.command import BatchCommand, exit_status

    if not job.tally.num_left:
        job.results.close()
        print("\n".join(summary_lines(job.tally, None, 0.0, flags.output, None)))
        return exit_status(job)

    from jaxserve.server.log_format import queue_logs

    queue_logs("stderr")  # the summary, on stdout, waits for its reader
    from jaxserve.engine import AsyncEngine
    from jaxserve.server.console import StartupDisplay

    # jax reports every backend that is not there; what is used shows in the memory plan.
    logging.getLogger("jax").setLevel(logging.WARNING)
    startup = StartupDisplay(plan_rows=lambda: engine.engine.runner.memory_plan.rows())
    engine: Any = AsyncEngine(config, progress=startup.progress)

    def figures() -> EngineFigures:
        return _figures(engine.engine)

    async def answer() -> int:
        return await BatchCommand(engine, job, startup, BatchDisplay(job.tally, figures), config.trace_file).run()

    return asyncio.run(answer())


def _settings(flags: FlagValues, config: EngineConfig) -> BatchSettings:
    """The job's settings.

    Raises:
      ValueError: a file is not named, or named twice.
    """
    for name in ("input", "output"):
        if not flags[name].value:
            raise ValueError(f"--{name} is missing; name the file of {'requests' if name == 'input' else 'results'}")
    trace = config.trace_file and Path(config.trace_file).resolve()
    if trace in (Path(flags.input).resolve(), Path(flags.output).resolve()):
        raise ValueError(f"--trace_file: {config.trace_file} is the input or the output; write to another file")
    # More than the slots, so that a freed one is filled at once; no more than can run and wait.
    window = min(4 * config.max_num_seqs, config.max_num_seqs + config.max_queue_requests)
    return BatchSettings(
        input=flags.input,
        output=flags.output,
        in_order=flags.output_order == "input",
        window=flags.window or window,
        max_line_bytes=flags.max_line_bytes,
        allow_changed_input=flags.allow_changed_input,
        fail_on_error=flags.fail_on_error,
        drain_grace_s=flags.drain_grace_s,
        tool_call_parser=flags.tool_call_parser,
    )


def _figures(engine: Any) -> EngineFigures:
    stats, config = engine.stats, engine.config
    return EngineFigures(
        output_tokens=stats.output_tokens,
        slot_utilisation=stats.slot_utilisation(config.max_num_seqs),
        budget_use=stats.budget_use(config.max_num_batched_tokens),
        preemptions=engine.scheduler.counters.preemptions,
    )


if __name__ == "__main__":
    status = main(sys.argv)
    from jaxserve.server.process import end

    end(status)

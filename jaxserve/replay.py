"""`python -m jaxserve.replay --trace=FILE`: exit 0 when the scheduler decides as recorded, 1 at a difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from jaxserve.config.command import run_command
from jaxserve.config.flags import exit_with, parse_flags
from jaxserve.scheduler import TraceWriter
from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.scheduler.trace_records import AddEvent, IterationRecord
from jaxserve.sim.perfetto import PerfettoWriter
from jaxserve.sim.replayer import ReplayReport, replay


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
      The exit status: 1 when the replay differs.

    Raises:
      SystemExit: non-zero on a bad argument or a damaged trace.
    """
    flags = parse_flags("replay", argv)
    if not flags.trace:
        exit_with("--trace is missing; name the file to replay")
    others = flags.with_trace or []
    paths = [Path(path).resolve() for path in (flags.trace, flags.output, flags.perfetto, *others) if path]
    if len(set(paths)) < len(paths):
        exit_with("two of --trace, --with_trace, --output and --perfetto are the same file; write to another file")
    if others and not flags.perfetto:
        exit_with("--with_trace is given without --perfetto, into which it is drawn; give both")
    try:
        reader = TraceReader(flags.trace)
        report = _replay(reader, flags.output, flags.perfetto, list(map(TraceReader, others)))
    except (OSError, ValueError) as error:
        exit_with(str(error))
    if reader.header.died_of:
        print(f"note: the engine died of {reader.header.death}")
    _tell(report)
    return 0 if report.difference is None else 1


def _replay(
    reader: TraceReader, output: str | None, perfetto: str | None, others: Sequence[TraceReader] = ()
) -> ReplayReport:
    """Replays into the files asked for; the export holds what was equal, and of `others` likewise.

    Raises:
      ValueError: a trace is damaged, or one of `others` replays otherwise.
    """
    header = reader.header
    with ExitStack() as files:
        writer = exporter = None
        if output:
            died = {"error": header.died_of} if header.died_of else None
            writer = files.enter_context(
                closing(TraceWriter(output, model=header.model, config=header.config, died=died))
            )
            if header.snapshot is not None:
                writer(header.snapshot)
        if perfetto:
            file = files.enter_context(open(perfetto, "w", encoding="utf-8"))
            exporter = files.enter_context(closing(PerfettoWriter(file, header)))
            origin = min(map(_first_instant, (reader, *others)))
            exporter.begin_at(origin)
        report = replay(reader, sink=writer, observe=exporter)
        if exporter is not None:
            exporter.end_engine()
            for number, other in enumerate(others, 2):
                drawing = PerfettoWriter(file, other.header, number)
                drawing.begin_at(origin)
                if (difference := replay(other, observe=drawing).difference) is not None:
                    raise ValueError(f"trace {number - 1} of --with_trace: {difference}")
                drawing.end_engine()
        return report


def _first_instant(reader: TraceReader) -> float:
    """At which the first thing in a trace happened; infinity where there is none."""
    record = next(iter(reader), None)
    if record is None:
        return math.inf
    asked = [
        event.received_at for event in record.events if isinstance(event, AddEvent) and event.received_at is not None
    ]
    planned = [record.now] if isinstance(record, IterationRecord) else []
    return min([event.now for event in record.events] + asked + planned, default=math.inf)


def _tell(report: ReplayReport) -> None:
    if report.truncated_line is not None:
        print(f"note: line {report.truncated_line} is cut short, as after a crash; it was left out")
    equal = f"{report.num_iterations} iterations, {report.num_requests} requests, {report.num_plans} plans"
    if report.difference is None:
        print(f"equal: {equal}")
        if ahead := report.num_plans - report.num_iterations:
            print(f"{ahead} of the plans were in flight when the trace ended and have no record to compare")
    else:
        print(f"first difference: {report.difference}\nequal before it: {equal}")


if __name__ == "__main__":
    run_command(main)

"""`python -m jaxserve.doctor --trace=FILE` or `--url=URL`: names the bottleneck, with figures and flags to try."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from jaxserve.config.flags import exit_with, parse_flags
from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.sim.diagnoses import Diagnosis, diagnose
from jaxserve.sim.metrics_summary import summary_of_metrics
from jaxserve.sim.server_pages import ServerPages, ServerState, UnreadableServerError
from jaxserve.sim.spread import Spread
from jaxserve.sim.summarizer import summarize
from jaxserve.sim.trace_summary import TraceSummary

_WIDTH = 100


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
      The exit status, 0: an ill run is an answer like any other.

    Raises:
      SystemExit: non-zero on a bad argument, a damaged trace or a server that cannot be read.
    """
    flags = parse_flags("doctor", argv)
    if bool(flags.trace) == bool(flags.url):
        exit_with("give one of --trace and --url: the trace or the server to look at")
    state: ServerState | None = None
    try:
        if flags.url:
            state, summary = _look_at(ServerPages(flags.url, flags.api_key))
        else:
            summary = summarize(TraceReader(flags.trace), flags.trace)
    except (OSError, ValueError, UnreadableServerError) as error:
        exit_with(str(error))
    diagnoses = diagnose(summary)
    if flags.json:
        report = {"summary": asdict(summary), "diagnoses": [asdict(diagnosis) for diagnosis in diagnoses]}
        print(json.dumps(({"state": asdict(state)} if state else {}) | report, indent=2))
    else:
        if state is not None and not state.is_ready:
            print(f"{flags.url} is {state.text}")
        print("\n".join(_report_lines(summary, diagnoses)))
    return 0


def _look_at(pages: ServerPages) -> tuple[ServerState | None, TraceSummary]:
    """What a server says of its state, and what its metrics come to; they answer in every state."""
    return pages.state(), summary_of_metrics(pages.get("/metrics").decode("utf-8", "replace"), pages.url)


def _report_lines(summary: TraceSummary, diagnoses: Sequence[Diagnosis]) -> list[str]:
    """The figures, then what they mean; a death, which they do not show, comes before them."""
    death = [line for each in diagnoses if each.name == "died" for line in (*_diagnosis_lines(each), "")]
    others = [line for each in diagnoses if each.name != "died" for line in ("", *_diagnosis_lines(each))]
    return [*death, *_summary_lines(summary), *others]


def _summary_lines(summary: TraceSummary) -> list[str]:
    counts = [f"{count} {name}" for name, count in (("offered", summary.offered), *summary.ended.items()) if count]
    refused = sum(summary.rejected.values())
    counts += [f"{refused} refused"] if refused else []
    lines = [f"{summary.source}: {summary.num_iterations} iterations; requests: {', '.join(counts) or 'none'}"]
    times = {"TTFT": summary.ttft_s, "queue": summary.queue_s, "prefill": summary.prefill_s}
    times |= {"ITL": summary.itl_s, "end to end": summary.e2e_s}
    return lines + [_spread_line(name, spread) for name, spread in times.items() if spread]


def _spread_line(name: str, spread: Spread) -> str:
    quantiles = (("p50", spread.p50), ("p95", spread.p95), ("p99", spread.p99), ("max", spread.max))
    return f"  {name:<11}" + "  ".join(f"{label} {value:>9.4f} s" for label, value in quantiles)


def _diagnosis_lines(diagnosis: Diagnosis) -> list[str]:
    lines = [f"{diagnosis.name}: {diagnosis.says}"]
    lines += [f"  {name:<28}{value:.6g}" for name, value in diagnosis.figures.items()]
    if diagnosis.flags:
        lines.append(f"  try: {' '.join(f'--{flag}' for flag in diagnosis.flags)}")
    return lines + textwrap.wrap(diagnosis.advice, _WIDTH, initial_indent="  ", subsequent_indent="  ")


if __name__ == "__main__":
    sys.exit(main(sys.argv))

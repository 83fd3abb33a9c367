"""`python -m jaxserve.doctor --trace=FILE` or `--url=URL`: names the bottleneck, with figures and flags to try."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from jaxserve.config.command import run_command
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
      The exit status: 0, an ill run is an answer like any other; 1 of a server that cannot be read, or neither is
      ready nor drains.

    Raises:
      SystemExit: 2 on a bad argument or a damaged trace.
    """
    flags = parse_flags("doctor", argv)
    if bool(flags.trace) == bool(flags.url):
        exit_with("give one of --trace and --url: the trace or the server to look at")
    if flags.url:
        return _examine_server(flags.url, flags.api_key, flags.json)
    try:
        summary = summarize(TraceReader(flags.trace), flags.trace)
    except (OSError, ValueError) as error:
        exit_with(str(error))
    _print_report(summary, None, flags.json)
    return 0


def _examine_server(url: str, api_key: str | None, as_json: bool) -> int:
    """Prints what a server's metrics tell; of one that does not go on, its state alone: no setting mends that.

    Returns:
      The exit status.
    """
    try:
        pages = ServerPages(url, api_key)
        state = pages.state()
        if state is not None and not state.goes_on:
            print(json.dumps({"state": asdict(state)}, indent=2) if as_json else f"{pages.url} is {state.text}")
            return 1
        summary = summary_of_metrics(pages.get("/metrics").decode("utf-8", "replace"), pages.url)
    except (ValueError, UnreadableServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _print_report(summary, state, as_json)
    return 0


def _print_report(summary: TraceSummary, state: ServerState | None, as_json: bool) -> None:
    diagnoses = diagnose(summary)
    if as_json:
        report = {"summary": asdict(summary), "diagnoses": [asdict(diagnosis) for diagnosis in diagnoses]}
        print(json.dumps(({"state": asdict(state)} if state else {}) | report, indent=2))
        return
    if state is not None and not state.is_ready:
        print(f"{summary.source} is {state.text}")
    print("\n".join(_report_lines(summary, diagnoses)))


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
    run_command(main)

"""A frame of the view: two samples of a server as rich renderables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxserve.sim.spread import Spread
from jaxserve.top.reader import ITERATIONS, Sample

_LATENCIES = {
    "queue": "request_queue_time_seconds",
    "TTFT": "time_to_first_token_seconds",
    "ITL": "inter_token_latency_seconds",
    "end to end": "e2e_request_latency_seconds",
}
_PREFILL, _DECODE, _IDLE = "▒", "█", "·"
_MAX_ID = 28


def frame(url: str, now: Sample, before: Sample, window: Sample | None) -> RenderableType:
    """The view.

    Args:
      before: the sample that rates are counted from.
      window: the one that latencies are counted from; None: since the server's start.
    """
    parts: list[RenderableType] = [_title(url, now), _figures(now, before), _latencies(now, window)]
    if now.state is None:
        parts.append(Text(f"slots and queue are not shown: {now.hidden}", style="yellow"))
    else:
        parts += [_slots(now.state), *_queue(now.state)]
    return Group(*(piece for part in parts for piece in (part, "")))


def _title(url: str, now: Sample) -> Text:
    state = "" if now.told is None else now.told.state
    model = "" if now.state is None else now.state["model"]
    title = Text.assemble((f"{model}  {state}  ".lstrip(), "bold"), url)
    if now.told is not None and not now.told.is_ready:
        title.append(f"\n{now.told.text}", style="bold yellow")
    return title


def _figures(now: Sample, before: Sample) -> Table:
    gained, seconds = now.metrics.since(before.metrics), max(now.at - before.at, 1e-9)
    table = Table.grid(padding=(0, 2))
    running, waiting = now.load["num_requests_running"], now.load["num_requests_waiting"]
    slots = "" if now.state is None else f" of {now.state['max_num_seqs']} slots"
    tokens = "" if now.state is None else f" ({now.state['waiting_tokens']:,} tokens)"
    table.add_row("requests", f"{running} running{slots}, {waiting} waiting{tokens}")
    ended = gained.by_label("request_success_total", "finished_reason")
    refused = int(gained.total("requests_rejected_total"))
    rates = [f"{count / seconds:.1f} {reason}/s" for reason, count in ended.items() if count]
    rates += [f"{refused / seconds:.1f} refused/s"] if refused else []
    table.add_row("ended", ", ".join(rates) or "none")
    prompt = gained.total("prompt_tokens_total") / seconds
    output = gained.total("generation_tokens_total") / seconds
    iterations = gained.total("iteration_tokens_total_count") / seconds
    table.add_row("tokens/s", f"{prompt:,.1f} prompt, {output:,.1f} output; {iterations:,.1f} iterations/s")
    usage = now.load["kv_cache_usage_perc"]
    kv = "" if now.state is None else _pages(now.state["kv"])
    table.add_row(
        "KV pages", Group(Text(f"{100 * usage:.1f} % used{kv}"), ProgressBar(total=1, completed=usage, width=40))
    )
    queries = gained.total("prefix_cache_queries_total")
    hits = f"{100 * gained.total('prefix_cache_hits_total') / queries:.1f} %" if queries else "none asked"
    preemptions = int(now.metrics.total("num_preemptions_total"))
    table.add_row("prefix cache", f"hits {hits}; preemptions since the start: {preemptions}")
    return table


def _pages(kv: dict[str, int]) -> str:
    return f": {kv['pages_owned']} owned, {kv['pages_cached']} cached, {kv['pages_free']} free"


def _latencies(now: Sample, window: Sample | None) -> Table:
    metrics = now.metrics if window is None else now.metrics.since(window.metrics)
    span = "since the server's start" if window is None else f"last {now.at - window.at:.0f} s"
    table = Table(title=f"Latency, {span}", title_justify="left", show_edge=False)
    table.add_column("")
    for name in ("p50", "p95", "p99", "count"):
        table.add_column(name, justify="right")
    for label, name in _LATENCIES.items():
        table.add_row(label, *_quantiles(metrics.spread(name)))
    return table


def _quantiles(spread: Spread | None) -> Iterable[str]:
    if spread is None:
        return ("-", "-", "-", "0")
    return (*(_milliseconds(value) for value in (spread.p50, spread.p95, spread.p99)), f"{spread.count:,}")


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def _slots(state: dict[str, Any]) -> Table:
    table = Table(
        title=f"Slots, the last iterations: {_PREFILL} prefill  {_DECODE} decode", title_justify="left", show_edge=False
    )
    for name, justify in (
        ("slot", "right"),
        ("request", "left"),
        ("tokens", "right"),
        ("pages", "right"),
        ("age", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("iterations")  # what a narrow terminal takes from first: the other columns do not wrap
    holders = {slot["slot"]: slot for slot in state["slots"]}
    strips = _strips(state)
    for slot in sorted(holders.keys() | strips.keys()):
        holder = holders.get(slot)
        strip = _Strip(strips.get(slot, ""))
        if holder is None:
            table.add_row(str(slot), Text("free", style="dim"), "", "", "", strip)
            continue
        total = holder["prompt_tokens"] + holder["max_tokens"]
        table.add_row(
            str(slot),
            Text(_shortened(holder["request_id"])),
            f"{holder['prompt_tokens'] + holder['output_tokens']}/{total}",
            str(holder["pages"]),
            f"{holder['age_s']:.1f} s",
            strip,
        )
    return table


@dataclass(frozen=True, slots=True)
class _Strip:
    """Marks of iterations, the last ones of which are shown where there is no room for all."""

    marks: str

    def __rich_measure__(self, _: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(len(self.marks), 1), len(self.marks)).with_maximum(options.max_width)

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.marks[-options.max_width :], no_wrap=True)


def _strips(state: dict[str, Any]) -> dict[int, str]:
    """Of each slot that worked lately, a character per iteration."""
    iterations = state["iterations"][-ITERATIONS:]
    strips: dict[int, list[str]] = {}
    for index, iteration in enumerate(iterations):
        for mark, slots in ((_PREFILL, [slot for slot, _ in iteration["prefill"]]), (_DECODE, iteration["decode"])):
            for slot in slots:
                strips.setdefault(slot, [_IDLE] * len(iterations))[index] = mark
    return {slot: "".join(marks) for slot, marks in strips.items()}


def _queue(state: dict[str, Any]) -> list[RenderableType]:
    if not state["queue"]:
        return []
    table = Table(title="Waiting, by arrival", title_justify="left", show_edge=False)
    for name in ("request", "prompt", "max_tokens", "waits"):
        table.add_column(name, justify="left" if name == "request" else "right", no_wrap=True)
    for each in state["queue"][:10]:
        waits = f"{each['age_s']:.1f} s"
        table.add_row(Text(_shortened(each["request_id"])), str(each["prompt_tokens"]), str(each["max_tokens"]), waits)
    more = state["num_requests_waiting"] - len(state["queue"][:10])
    return [table, Text(f"and {more} more")] if more > 0 else [table]


def _shortened(request_id: str) -> str:
    plain = "".join(char if char.isprintable() else "?" for char in request_id)
    return plain if len(plain) <= _MAX_ID else plain[: _MAX_ID - 1] + "…"

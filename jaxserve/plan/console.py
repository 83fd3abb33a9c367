"""A plan on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxserve.plan.compiled import CompiledStep
from jaxserve.plan.plan import Plan
from jaxserve.plan.speed import Speed
from jaxserve.runtime import format_bytes


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """All of it: verdict, memory, requests, programs, collectives, speed, arithmetic, notes."""
    parts = [_verdict(plan), _memory(plan)]
    if plan.steps:
        parts += [_programs(plan), _collectives(plan)]
    parts.append(_speeds(plan))
    shown = console or Console()
    # Wide enough for every column whatever the terminal's width.
    widest = max(Console(width=1000).measure(part).maximum for part in parts if isinstance(part, Table))
    wide = Console(file=shown.file, width=max(shown.width, widest), highlight=False)
    for part in parts:
        wide.print(part)
        wide.print()
    wide.print("Arithmetic of the roofline (as simulate --cost_model=roofline prints it)", style="bold")
    for line in plan.arithmetic:
        wide.print(line, markup=False, soft_wrap=True)
    if plan.notes:
        wide.print()
        for note in plan.notes:
            wide.print(f"note: {note}", markup=False, soft_wrap=True)


def _verdict(plan: Plan) -> RenderableType:
    sizing, config = plan.sizing, plan.sizing.shapes.config
    where = sizing.where
    chips = f"{where.num_chips} x {where.chip.name}, {where.num_hosts} host{'s' * (where.num_hosts > 1)}"
    title = f"{plan.name} on {where.name} ({chips}), tensor_parallel_size {config.tensor_parallel_size}, {config.dtype}"
    lines = [Text(title, style="bold")]
    if plan.fits:
        lines.append(Text("fits", style="bold green"))
    else:
        missing = format_bytes(sizing.missing_bytes)
        lines.append(Text(f"does not fit: {missing} per device are missing; {plan.why_not}", style="bold red"))
        lines += [Text(f"  fits with {each.flags}   ({each.says}; by arithmetic)") for each in plan.remedies]
        if not plan.remedies:
            lines.append(Text(f"  no slice of {where.kind} that is known here and no 8-bit form makes it fit"))
    if plan.compiled is None:
        lines.append(
            Text(f"not compiled ({plan.why_not_compiled}): activations are estimated, collectives assumed", "yellow")
        )
    return Group(*lines)


def _memory(plan: Plan) -> Table:
    sizing, shapes = plan.sizing, plan.sizing.shapes
    table = _table("Memory of one device", ["", "bytes", ""])
    activations = "temporary and output, of the compiled step" if plan.compiled else "estimated"
    kv = f"{sizing.pages:,} pages of {shapes.kv.page_size} tokens"
    rows = [
        ("weights", shapes.weights_bytes, ""),
        ("activations", sizing.step_bytes, activations),
        ("slot state", shapes.state_bytes, f"{shapes.config.max_num_seqs} slots"),
        ("KV pages", sizing.pages * sizing.page_bytes, kv),
        ("allowed", sizing.allowed_bytes, f"memory_fraction {shapes.config.memory_fraction:g}"),
        ("in all", int(sizing.where.chip.memory_bytes), f"as published for {sizing.where.chip.name}"),
    ]
    for label, count, remark in rows:
        table.add_row(label, f"{count:,}", f"{format_bytes(count)}{'; ' * bool(remark)}{remark}")
    table.add_section()
    own = sizing.own_kv_token_bytes
    table.add_row("KV of a token", f"{sizing.kv_token_bytes:,}", f"{own:,} on each device")
    table.add_row("tokens held at once", f"{plan.max_concurrent_tokens:,}", "")
    length = shapes.limits.max_model_len
    table.add_row("requests at once", str(plan.max_concurrent_requests), f"of max_model_len, {length:,} tokens each")
    return table


def _programs(plan: Plan) -> Table:
    headings = ["step", "arguments planned", "compiled", "difference", "temporary", "output", "code", "compiled in"]
    table = _table("Compiled programs: bytes on one device", headings)
    for step in plan.steps:
        table.add_row(
            _name(step),
            f"{step.planned_argument_bytes:,}",
            f"{step.argument_bytes:,}",
            f"{step.difference:+.2%}",
            f"{step.temp_bytes:,}",
            f"{step.output_bytes:,}",
            f"{step.code_bytes:,}",
            f"{step.compile_s:.1f} s",
        )
    return table


def _collectives(plan: Plan) -> Table:
    size = plan.sizing.shapes.config.tensor_parallel_size
    table = _table(
        "Collectives of one step", ["step", "kind", "result", "bytes each", "count", "sent by each device", ""]
    )
    for step in plan.steps:
        for each in step.collectives:
            remarks = ["only if asked for"] * each.conditional + ["rounds of its loop unknown"] * (not each.trips_known)
            counts = [f"{each.bytes_each:,}", f"{each.count:,}", f"{each.sent_bytes(size):,.0f}"]
            table.add_row(_name(step), each.kind, each.result, *counts, ", ".join(remarks))
        if not step.collectives:
            table.add_row(_name(step), "none", "", "", "0", "0", "")
    return table


def _speeds(plan: Plan) -> Table:
    headings = ["step", "context", "compute", "memory", "roofline", "interconnect", "together", "tokens/s"]
    table = _table("Speed, as bounds (roofline; not measured): milliseconds", headings)
    for speeds in (plan.decode, plan.prefill):
        for speed in speeds:
            table.add_row(*_speed_cells(speed))
        table.add_section()
    slots = plan.sizing.shapes.config.max_num_seqs
    if any(speed.rows > slots for speed in plan.decode):
        table.caption, table.caption_justify = f"more than {slots} rows: with as many slots (max_num_seqs)", "left"
    return table


def _speed_cells(speed: Speed) -> Sequence[str]:
    name = f"prefill {speed.tokens} tokens" if speed.tokens else f"decode {speed.rows} row{'s' * (speed.rows > 1)}"
    links = "not counted" if speed.interconnect_s is None else _ms(speed.interconnect_s)
    times = [_ms(each) for each in (speed.compute_s, speed.memory_s, speed.roofline_s)]
    return [name, f"{speed.context:,}", *times, links, _ms(speed.total_s), f"{speed.tokens_per_s:,.0f}"]


def _name(step: CompiledStep) -> str:
    rows = [f"decode {step.bucket.decode_rows}"] * bool(step.bucket.decode_rows)
    return " + ".join([*rows, *[f"prefill {step.bucket.prefill_tokens}"] * bool(step.bucket.prefill_tokens)])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    return table

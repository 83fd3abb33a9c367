"""What a soak found, as a table, JSON and Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve.soak.findings import quantile
from jaxserve.soak.run import Soaked
from jaxserve.soak.watch import MIB, Limits

SHOWN_BREACHES = 10
ENDS = ("offered", "completed", "rejected", "expired", "aborted", "failed")
COUNTED = (
    "num_preemptions_total",
    "generation_tokens_total",
    "prefix_cache_hits_total",
    "step_failures_total",
    "step_recoveries_total",
    "requests_failed_by_step_total",
    "nan_logits_total",
    "engine_stuck_total",
    "engine_resumed_total",
)
"""Metrics whose growth is reported."""


def document(soaked: Soaked, settings: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Everything, JSON-able."""
    findings, watch = soaked.findings, soaked.watch
    return {
        "what": "soak",
        "settings": settings,
        "seconds": soaked.seconds,
        "rounds": soaked.num_rounds,
        "actions": soaked.num_actions,
        "outcomes": {kind: dict(counts) for kind, counts in sorted(findings.outcomes.items())},
        "requests": {end: watch.totals.get(end, 0) for end in ENDS},
        "counters": {name: watch.last[name] - watch.first[name] for name in COUNTED},
        "faults": watch.faults,
        "compiles": watch.last["compiles_total"] - watch.first["compiles_total"],
        "latencies_ms": {name: _quantiles(values) for name, values in sorted(findings.latencies_s.items())},
        "memory": {
            "first_mib": watch.samples[0][1] / MIB if watch.samples else None,
            "last_mib": watch.samples[-1][1] / MIB if watch.samples else None,
            "growth_mib": watch.growth_mib,
            "over_s": watch.looked_at_s,
            "limit_mib": limits.growth_mib,
        },
        "held_at_rests": watch.rests,
        "num_breaches": findings.num_breaches,
        "breaches": [{"at_s": each.at, "rule": each.rule, "what": each.what} for each in findings.breaches],
    }


def markdown(found: dict[str, Any]) -> str:
    """The document as a page."""
    lines = ["# Soak", "", f"{found['seconds']:.0f} s, {found['rounds']} rounds, {found['actions']} actions.", ""]
    lines += ["| kind | ends |", "| --- | --- |"]
    for kind, counts in found["outcomes"].items():
        lines.append(f"| {kind} | {', '.join(f'{name} {count}' for name, count in sorted(counts.items()))} |")
    lines += ["", "| what | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in facts(found)]
    lines += ["", f"{found['num_breaches']} breaches.", ""]
    lines += [f"- {each['at_s']:.1f} s, {each['rule']}: {each['what']}" for each in found["breaches"]]
    return "\n".join(lines).rstrip() + "\n"


def facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and value of what is not counted by kind."""
    memory = found["memory"]
    rests = found["held_at_rests"]
    rows = [(f"requests {name}", f"{value:,}") for name, value in found["requests"].items()]
    rows += [(name.removesuffix("_total"), f"{value:,.0f}") for name, value in found["counters"].items()]
    rows += [(f"faults at {name}", f"{value:,.0f}") for name, value in sorted(found["faults"].items())]
    rows.append(("compiles", f"{found['compiles']:g}"))
    for name, values in found["latencies_ms"].items():
        rows.append((f"{name} ms p50, p99, most", ", ".join(f"{values[key]:.1f}" for key in ("p50", "p99", "max"))))
    if memory["first_mib"] is not None:
        rows.append(("RSS MiB first, last", f"{memory['first_mib']:.0f}, {memory['last_mib']:.0f}"))
    growth = f"{memory['growth_mib']:+.1f} in {memory['over_s']:.0f} s (limit {memory['limit_mib']:g})"
    rows.append(("RSS growth MiB (slope x time)", growth))
    if rests:
        rows += [(f"{name} at first, last rest", f"{rests[0][name]:g}, {rests[-1][name]:g}") for name in rests[0]]
    return rows


def text(found: dict[str, Any]) -> str:
    """The document for a terminal: outcomes, facts, the first breaches."""
    width = max(len(kind) for kind in found["outcomes"]) + 2 if found["outcomes"] else 2
    lines = [
        kind.ljust(width) + ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        for kind, counts in found["outcomes"].items()
    ]
    lines += ["", *(f"{name}: {value}" for name, value in facts(found)), ""]
    lines.append(f"{found['num_breaches']} breaches")
    for each in found["breaches"][:SHOWN_BREACHES]:
        lines.append(f"  {each['at_s']:.1f} s  {each['rule']}: {each['what']}")
    return "\n".join(lines)


def write(found: dict[str, Any], output: str) -> None:
    """`OUTPUT.json` and `OUTPUT.md`."""
    stem = Path(output)
    stem.with_suffix(".json").write_text(json.dumps(found, indent=2) + "\n")
    stem.with_suffix(".md").write_text(markdown(found))


def _quantiles(seconds: list[float]) -> dict[str, float]:
    return {"p50": 1e3 * quantile(seconds, 50), "p99": 1e3 * quantile(seconds, 99), "max": 1e3 * max(seconds)}

"""`bench buckets`: how many programs an engine compiles, and how much of their shapes a workload leaves empty.

The serving scheduler runs the workload under the simulator; every plan takes the smallest bucket that holds it, as in
the engine. Beside the sizes that are chosen unless flags say otherwise stand two other ways to choose: sizes that
double, which are more programs with less padding, and the limits alone, the fewest programs. No model, no device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from absl.flags import FlagValues

from jaxserve.bench.load.requests import WORKLOADS
from jaxserve.bench.report import Column, report
from jaxserve.config import SchedulerConfig
from jaxserve.scheduler import StepPlan
from jaxserve.sim import LinearCost, Simulator, Workload, load_workload
from jaxserve.tables import Bucket, BucketTable, num_programs

SLOTS = (8, 32)
TOKEN_BUDGET, PAGE_SIZE, MAX_MODEL_LEN = 512, 16, 8192
"""The server's defaults, on a model of that context."""
COST = LinearCost(constant_s=0.02, decode_row_s=0.001, kv_token_s=0.0, prefill_token_s=0.001, prefill_attention_s=0.0)
"""For arrivals at instants of their own: the order of the demo model on two cores."""
NAMED = ("w1", "w2")

COLUMNS = (
    Column("slots", "slots", "d"),
    Column("sizes", "sizes"),
    Column("decode_rows", "decode rows"),
    Column("prefill_tokens", "prefill tokens"),
    Column("table_widths", "table widths"),
    Column("programs", "programs", "d"),
    Column("used_buckets", "steps used", "d"),
    Column("iterations", "iterations", "d"),
    Column("row_padding", "rows padded", ".1%"),
    Column("table_padding", "table entries padded", ".1%"),
)


@dataclass(slots=True)
class PaddingCount:
    """Sums over plans: what their buckets hold, and what of it is used.

    Attributes:
      tokens, rows: of decode rows and prompt tokens: used, in all.
      pages, entries: of the page tables' entries, likewise.
      used: buckets that some plan took.
    """

    table: BucketTable
    page_size: int
    iterations: int = 0
    tokens: int = 0
    rows: int = 0
    pages: int = 0
    entries: int = 0
    used: set[Bucket] = field(default_factory=set)

    def add(self, plan: StepPlan) -> None:
        """Counts one plan."""
        bucket = self.table.of_plan(plan)
        self.used.add(bucket)
        self.iterations += 1
        self.tokens += plan.num_tokens
        self.rows += bucket.decode_rows + bucket.prefill_tokens
        contexts = [position + 1 for position in plan.decode.positions] + [chunk.end for chunk in plan.prefill]
        self.pages += sum(-(-context // self.page_size) for context in contexts)
        self.entries += bucket.sample_rows * bucket.table_width


def run(flags: FlagValues) -> None:
    """Counts for every number of slots and every way to choose sizes, and reports.

    Raises:
      ValueError: the workload cannot be read, or a request of it is too long.
    """
    name = flags.workload or "w1"
    workload = load_workload(WORKLOADS / f"{name}.json" if name in NAMED else Path(name))
    if workload.longest > MAX_MODEL_LEN:
        raise ValueError(f"{name} has a request of {workload.longest} tokens; the limit here is {MAX_MODEL_LEN}")
    slots = flags.slots if flags["slots"].present else SLOTS
    results = [result for count in slots for result in measure(workload, count)]
    settings = {
        "workload": name,
        "max_num_batched_tokens": TOKEN_BUDGET,
        "page_size": PAGE_SIZE,
        "max_model_len": MAX_MODEL_LEN,
    }
    report("buckets", settings, results, COLUMNS, flags.output)


def measure(workload: Workload, slots: int) -> list[dict[str, Any]]:
    """One result per way to choose sizes, all over the same plans."""
    config = SchedulerConfig(
        max_num_seqs=slots,
        max_num_batched_tokens=max(TOKEN_BUDGET, slots),
        prefill_chunk=max(TOKEN_BUDGET, slots),
        page_size=PAGE_SIZE,
        max_model_len=MAX_MODEL_LEN,
        num_pages=slots * MAX_MODEL_LEN // PAGE_SIZE + 1,
        max_queue_requests=workload.num_requests,
        max_queue_tokens=workload.num_requests * MAX_MODEL_LEN,
        max_steps_ahead=1,
    )
    counts = {name: PaddingCount(table, PAGE_SIZE) for name, table in _tables(config).items()}

    def add(plan: StepPlan) -> None:
        for count in counts.values():
            count.add(plan)

    Simulator(config, COST, workload.source(), on_plan=add).run()
    return [
        {
            "slots": slots,
            "sizes": name,
            "decode_rows": _listed(count.table.decode),
            "prefill_tokens": _listed(count.table.prefill),
            "table_widths": _listed(count.table.widths),
            "programs": num_programs(count.table.all()),
            "used_buckets": len(count.used),
            "iterations": count.iterations,
            "row_padding": 1 - count.tokens / count.rows,
            "table_padding": 1 - count.pages / count.entries,
        }
        for name, count in counts.items()
    ]


def _tables(config: SchedulerConfig) -> dict[str, BucketTable]:
    chosen = BucketTable(config)
    limits = {"decode": chosen.decode[-1:], "prefill": chosen.prefill[-1:], "widths": chosen.widths[-1:]}
    doubling = {
        "decode": _doubling(8, chosen.decode[-1]),
        "prefill": _doubling(32, chosen.prefill[-1]),
        "widths": _doubling(chosen.widths[0], chosen.widths[-1]),
    }
    return {
        "chosen": chosen,
        "doubling": BucketTable(config, **doubling),
        "limits alone": BucketTable(config, **limits),
    }


def _doubling(first: int, limit: int) -> tuple[int, ...]:
    sizes = []
    while first < limit:
        sizes.append(first)
        first *= 2
    return (*sizes, limit)


def _listed(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))

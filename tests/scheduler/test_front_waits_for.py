"""What a trace says the queue's front waited for, one case for each answer."""

from __future__ import annotations

from jaxserve.config import ServiceClass
from jaxserve.core import Priority
from jaxserve.scheduler.waits_for import WaitsFor
from tests.scheduler.harness import Harness, make_config, make_request


def answers(harness: Harness) -> list[str | None]:
    """Of each iteration of the run, which goes on to its end."""
    harness.run()
    return [record["front_waits_for"] for record in harness.records if "kind" not in record]


def test_nobody_waits() -> None:
    harness = Harness()
    harness.add(make_request("a", 4, 2), make_request("b", 4, 2))
    assert answers(harness) == [None, None]


def test_for_a_slot() -> None:
    harness = Harness(make_config(max_num_seqs=1))
    harness.add(make_request("a", 4, 2), make_request("b", 4, 1))
    assert answers(harness) == [WaitsFor.SLOT, WaitsFor.SLOT, None]


def test_for_pages() -> None:
    """Three pages: a needs all of them."""
    harness = Harness(make_config(num_pages=4))
    harness.add(make_request("a", 8, 3), make_request("b", 8, 1))
    assert answers(harness) == [WaitsFor.PAGES] * 3 + [None]


def test_for_a_place_of_its_class() -> None:
    harness = Harness(make_config(service_classes=(ServiceClass("bulk", max_slots=1),)))
    harness.add(*(make_request(name, 4, 2, service_class="bulk") for name in "ab"))
    assert answers(harness) == [WaitsFor.CLASS, WaitsFor.CLASS, None, None]


def test_for_the_batch_to_end() -> None:
    """Two of four slots are filled, and stay so."""
    harness = Harness(make_config(batching="static"))
    harness.add(make_request("a", 4, 3), make_request("b", 4, 1))
    harness.step()
    harness.add(make_request("c", 4, 1))
    assert answers(harness) == [None, WaitsFor.BATCH, WaitsFor.BATCH, None]


def test_for_its_last_step() -> None:
    """low loses its slot to high, which needs it for one plan; low's step is in flight for one longer."""
    harness = Harness(make_config(max_num_seqs=2, priority_preemption=True), lag=2)
    harness.add(make_request("low", 4, 9, priority=Priority.LOW), make_request("other", 4, 9))
    harness.step()
    harness.step()
    harness.add(make_request("high", 4, 1, priority=Priority.HIGH))
    assert answers(harness)[:5] == [None, None, WaitsFor.SLOT, WaitsFor.STEP, None]


def test_for_an_iteration_after_a_preemption() -> None:
    """Four pages: both hold two when a needs a third, and b gives up its own. a then needs all."""
    config = make_config(max_num_seqs=2, num_pages=5, reservation="optimistic", preemption="recompute")
    harness = Harness(config)
    harness.add(make_request("a", 3, 10), make_request("b", 3, 10))
    found = answers(harness)
    assert found.count(WaitsFor.PREEMPTION) == harness.scheduler.counters.preemptions == 1
    (first,) = [index for index, answer in enumerate(found) if answer == WaitsFor.PREEMPTION]
    assert found[:first] == [None] * first and found[first + 1] == WaitsFor.PAGES

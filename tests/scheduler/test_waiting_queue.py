"""SequenceHeap: order, and leaving from the middle."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.sequence_heap import SequenceHeap
from tests.scheduler.harness import make_request


def sequences(count: int) -> list[Sequence]:
    return [Sequence(make_request(f"r{i}"), i, 0.0) for i in range(count)]


def drain(heap: SequenceHeap) -> list[int]:
    order = []
    while front := heap.front():
        order.append(front[1].arrival)
        heap.remove(front[1])
    return order


def test_least_key_comes_first() -> None:
    heap, (a, b, c) = SequenceHeap(), sequences(3)
    heap.push((2.0, 0), a)
    heap.push((1.0, 1), b)
    heap.push((1.0, 2), c)
    assert drain(heap) == [1, 2, 0]


def test_a_sequence_that_left_may_come_back_with_the_same_or_another_key() -> None:
    heap, (a, b) = SequenceHeap(), sequences(2)
    heap.push((5.0, 0), a)
    heap.push((3.0, 1), b)
    assert heap.remove(a) and not heap.remove(a)
    heap.push((5.0, 0), a)
    assert sorted(heap.entries(), key=lambda e: e[0]) == [((3.0, 1), b), ((5.0, 0), a)]
    assert heap.remove(a)
    heap.push((1.0, 0), a)
    assert drain(heap) == [0, 1]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=300))
def test_it_equals_a_sorted_list_and_dead_entries_stay_few(moves: list[tuple[int, int]]) -> None:
    heap, model, everyone = SequenceHeap(), dict[int, tuple[float, int]](), sequences(31)
    for who, key in moves:
        if who in model:
            assert heap.remove(everyone[who])
            del model[who]
        else:
            model[who] = (float(key), who)
            heap.push(model[who], everyone[who])
        assert len(heap) == len(model)
        assert len(heap._heap) <= 2 * len(model) + heap._SLACK + 1
    expected = sorted(model, key=lambda who: model[who])
    assert [s.arrival for _, s in sorted(heap.entries(), key=lambda entry: entry[0])] == expected
    assert drain(heap) == expected

"""DecodeRows: rows kept by column read like a sequence of rows."""

from __future__ import annotations

from jaxserve.scheduler import DecodeRow, DecodeRows, StepPlan

ROWS = [DecodeRow("a", 2, 9), DecodeRow("b", 0, 4), DecodeRow("c", 1, 7)]


def test_columns_give_back_the_rows_they_were_made_of() -> None:
    rows = DecodeRows.of(iter(ROWS))
    assert (rows.request_ids, rows.slots, rows.positions) == (("a", "b", "c"), (2, 0, 1), (9, 4, 7))
    assert list(rows) == ROWS and len(rows) == 3
    assert rows[1] == ROWS[1] and rows[-1] == ROWS[2]
    assert rows[1:] == DecodeRows.of(ROWS[1:])
    assert ROWS[0] in rows and DecodeRow("a", 2, 8) not in rows


def test_a_plan_counts_them_and_is_empty_without() -> None:
    assert StepPlan(0).empty
    plan = StepPlan(0, decode=DecodeRows.of(ROWS))
    assert not plan.empty and plan.num_tokens == 3
    assert plan == StepPlan(0, decode=DecodeRows.of(ROWS)) != StepPlan(0, decode=DecodeRows.of(ROWS[:2]))

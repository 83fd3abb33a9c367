"""The cost of rows and tokens is found again in durations made from it."""

from __future__ import annotations

import pytest

from jaxserve.sim.iteration_cost import CostFit, IterationCost
from jaxserve.sim.spread import Spread, spread_of


def fit(*iterations: tuple[int, int, float]) -> IterationCost:
    costs = CostFit()
    for iteration in iterations:
        costs.add(*iteration)
    return costs.solve()


def test_exact_costs_are_found() -> None:
    shapes = [(1, 0), (4, 0), (2, 64), (8, 16), (0, 128), (8, 0)]
    cost = fit(*((rows, tokens, 0.01 + 0.002 * rows + 0.0003 * tokens) for rows, tokens in shapes))
    assert (cost.fixed_s, cost.per_row_s, cost.per_token_s) == pytest.approx((0.01, 0.002, 0.0003))


def test_what_never_varies_costs_nothing() -> None:
    assert fit((4, 0, 0.5), (4, 10, 0.6)) == IterationCost(pytest.approx(0.5), 0.0, pytest.approx(0.01))
    assert fit((1, 8, 0.5), (2, 8, 0.6)) == IterationCost(pytest.approx(0.4), pytest.approx(0.1), 0.0)
    assert fit((4, 8, 0.5), (4, 8, 0.7)) == IterationCost(pytest.approx(0.6), 0.0, 0.0)
    assert fit() == IterationCost(0.0, 0.0, 0.0)


def test_a_negative_slope_is_left_out_and_the_other_fitted_alone() -> None:
    cost = fit((1, 0, 0.5), (9, 0, 0.1), (1, 10, 0.9), (9, 10, 0.5))
    assert cost.per_row_s == 0.0 and cost.per_token_s == pytest.approx(0.04)
    cost = fit((0, 1, 0.5), (0, 9, 0.1), (10, 1, 0.9), (10, 9, 0.5))
    assert cost.per_token_s == 0.0 and cost.per_row_s == pytest.approx(0.04)


def test_quantiles_are_values_that_occurred() -> None:
    assert spread_of([]) is None
    assert spread_of([3.0]) == Spread(1, 3.0, 3.0, 3.0, 3.0)
    assert spread_of(float(n) for n in range(100, 0, -1)) == Spread(100, 50.0, 95.0, 99.0, 100.0)
    assert spread_of([1.0, 2.0, 9.0]) == Spread(3, 2.0, 9.0, 9.0, 9.0)

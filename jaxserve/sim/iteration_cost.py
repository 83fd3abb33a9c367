"""IterationCost: what a decode row and a prefill token add to an iteration's duration, from a trace itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IterationCost:
    """duration = fixed + per_row * decode rows + per_token * prefill tokens; seconds, each >= 0."""

    fixed_s: float
    per_row_s: float
    per_token_s: float


class CostFit:
    """Least squares over iterations, from running sums.

    The two slopes solve the 2x2 normal equations of the centred values. A quantity that never varies
    explains nothing and costs 0; so does one whose slope comes out negative, and the other is then fitted
    alone.
    """

    def __init__(self) -> None:
        self._count = 0
        self._means = [0.0, 0.0, 0.0]  # rows, tokens, seconds
        self._products = [[0.0] * 3 for _ in range(3)]  # sums of products of deviations from the means

    def add(self, num_rows: float, num_tokens: int, duration_s: float) -> None:
        """One iteration."""
        self._count += 1
        values = (float(num_rows), float(num_tokens), duration_s)
        before = [value - mean for value, mean in zip(values, self._means, strict=True)]
        self._means = [mean + delta / self._count for mean, delta in zip(self._means, before, strict=True)]
        after = [value - mean for value, mean in zip(values, self._means, strict=True)]
        for i in range(3):
            for j in range(3):
                self._products[i][j] += before[i] * after[j]

    def solve(self) -> IterationCost:
        """The fit; all zero of no iteration."""
        (rows, both, rows_s), (_, tokens, tokens_s), _ = self._products
        determinant = rows * tokens - both * both
        per_row = per_token = 0.0
        if determinant > 1e-9 * rows * tokens:
            per_row = (rows_s * tokens - tokens_s * both) / determinant
            per_token = (tokens_s * rows - rows_s * both) / determinant
        elif tokens:
            per_token = tokens_s / tokens
        elif rows:
            per_row = rows_s / rows
        if per_row < 0.0:
            per_row, per_token = 0.0, tokens_s / tokens if tokens else 0.0
        if per_token < 0.0:
            per_row, per_token = rows_s / rows if rows else 0.0, 0.0
        per_row, per_token = max(per_row, 0.0), max(per_token, 0.0)
        mean_rows, mean_tokens, mean_s = self._means
        fixed = max(mean_s - per_row * mean_rows - per_token * mean_tokens, 0.0)
        return IterationCost(fixed, per_row, per_token)

"""StepTimeModel: how long an iteration takes, learned from those that ran."""

from __future__ import annotations

from operator import mul


class StepTimeModel:
    """seconds = a + b * decode rows + c * prompt tokens, fitted by recursive least squares.

    Old measurements fade (Ljung, "System Identification", ch. 11, with a forgetting factor), so the model
    follows growing contexts. Coefficients below zero count as zero.
    """

    FORGETTING = 0.98
    MIN_STEPS = 8
    _INITIAL_VARIANCE = 1e4

    def __init__(self) -> None:
        self._weights = [0.0, 0.0, 0.0]
        self._covariance = [[self._INITIAL_VARIANCE * (i == j) for j in range(3)] for i in range(3)]
        self._num_steps = 0
        self.fastest_s = 0.0

    def observe(self, num_decode: int, num_prefill: int, seconds: float) -> None:
        """An iteration with so many decode rows and prompt tokens took `seconds`."""
        if seconds <= 0.0:
            return
        x = (1.0, float(num_decode), float(num_prefill))
        p = self._covariance
        px = [sum(map(mul, row, x)) for row in p]
        gain_scale = self.FORGETTING + sum(map(mul, x, px))
        error = seconds - self.predict(num_decode, num_prefill)
        self._weights = [weight + each / gain_scale * error for weight, each in zip(self._weights, px, strict=True)]
        for row, by_row in zip(p, px, strict=True):
            row[:] = [
                (value - by_row * by_column / gain_scale) / self.FORGETTING
                for value, by_column in zip(row, px, strict=True)
            ]
        # Directions that were not seen for long would grow without bound.
        largest = max(p[0][0], p[1][1], p[2][2])
        if largest > self._INITIAL_VARIANCE:
            scale = self._INITIAL_VARIANCE / largest
            for row in p:
                row[:] = [value * scale for value in row]
        self._num_steps += 1
        self.fastest_s = seconds if self._num_steps == 1 else min(self.fastest_s, seconds)

    def predict(self, num_decode: int, num_prefill: int) -> float:
        """Seconds of an iteration; 0.0 before the first was measured."""
        a, b, c = self._weights
        return a + b * num_decode + c * num_prefill

    def prefill_tokens_within(self, target_s: float, num_decode: int) -> int | None:
        """Prompt tokens that fit beside the decode rows; None while too little was measured to say."""
        a, b, c = self._weights
        if self._num_steps < self.MIN_STEPS or c <= 0.0:
            return None
        return max(int((target_s - a - max(b, 0.0) * num_decode) / c), 0)

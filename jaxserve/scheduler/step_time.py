"""StepTimeModel: how long an iteration takes, and a page's copy to the host, learned from those that ran."""

from __future__ import annotations

from operator import mul


class StepTimeModel:
    """seconds = a + b * decode rows + c * prompt tokens, fitted by recursive least squares.

    Old measurements fade (Ljung, "System Identification", ch. 11, with a forgetting factor), so the model
    follows growing contexts. Coefficients below zero count as zero.

    Attributes:
      fits: whether anything is asked but `fastest_s`, as fitting takes time in every iteration: whether `observe` is
        called, or `observe_fastest` instead.
      fastest_s: of all iterations without swapped pages; 0.0 before the first.
    """

    FORGETTING = 0.98
    MIN_STEPS = 8
    _INITIAL_VARIANCE = 1e4
    _SWAP_GAIN = 0.25

    def __init__(self, *, fits: bool = True) -> None:
        self.fits = fits
        self._weights = [0.0, 0.0, 0.0]
        self._covariance = [[self._INITIAL_VARIANCE * (i == j) for j in range(3)] for i in range(3)]
        self._num_steps = 0
        self._swap_page_s: float | None = None
        self.fastest_s = 0.0

    def observe(self, num_decode: float, num_prefill: int, seconds: float, num_swapped: int = 0) -> None:
        """A step with so many decode rows, prompt tokens and swapped pages took `seconds`.

        Of an iteration of several steps it is the mean one, with the rows it had in the mean.
        """
        if seconds <= 0.0:
            return
        if num_swapped:
            self._observe_swap(num_swapped, seconds - self.predict(num_decode, num_prefill))
            return
        self.observe_fastest(seconds)
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

    def observe_fastest(self, seconds: float) -> None:
        """A step without swapped pages took `seconds`: what `fastest_s` needs of it."""
        if seconds > 0.0:
            self.fastest_s = seconds if self._num_steps == 0 else min(self.fastest_s, seconds)
            self._num_steps += 1

    def predict(self, num_decode: float, num_prefill: int) -> float:
        """Seconds of an iteration; 0.0 before the first was measured."""
        a, b, c = self._weights
        return a + b * num_decode + c * num_prefill

    def decode_s(self, num_rows: int) -> float | None:
        """Seconds of a step of decode rows alone, above 0; None while too little was measured to say."""
        return None if self._num_steps < self.MIN_STEPS else max(self.predict(num_rows, 0), self.fastest_s)

    def prefill_s(self, num_tokens: int) -> float | None:
        """Seconds that so many prompt tokens add to iterations; None while too little was measured to say."""
        if self._num_steps < self.MIN_STEPS or self._weights[2] <= 0.0:
            return None
        return self._weights[2] * num_tokens

    def swap_s(self, num_pages: int) -> float | None:
        """Seconds that copying so many pages, to the host or back, adds; None before the first was measured."""
        return None if self._swap_page_s is None else self._swap_page_s * num_pages

    def forget_swap(self, share: float) -> None:
        """Lowers the price of a swap by a share of it: one that nobody pays is not measured any more."""
        if self._swap_page_s is not None:
            self._swap_page_s *= 1.0 - share

    def _observe_swap(self, num_pages: int, seconds: float) -> None:
        if self._num_steps < self.MIN_STEPS:
            return
        page_s = max(seconds, 0.0) / num_pages
        old = page_s if self._swap_page_s is None else self._swap_page_s
        self._swap_page_s = old + self._SWAP_GAIN * (page_s - old)

    def prefill_tokens_within(self, target_s: float, num_decode: int) -> int | None:
        """Prompt tokens that fit beside the decode rows; None while too little was measured to say."""
        a, b, c = self._weights
        if self._num_steps < self.MIN_STEPS or c <= 0.0:
            return None
        return max(int((target_s - a - max(b, 0.0) * num_decode) / c), 0)

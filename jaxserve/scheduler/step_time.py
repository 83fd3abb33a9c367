"""StepTimeModel: how long an iteration takes, and a page's copy to the host, learned from those that ran."""

from __future__ import annotations

import math
from operator import mul

PAIRS = 1000
"""The unit of `attended_pairs`: it brings them near the other features, which keeps the fit well-conditioned."""


def attended_pairs(start: int, size: int) -> float:
    """Thousands of pairs of a token and one that it attends to, in a chunk of `size` tokens after `start` others."""
    return size * (start + 0.5 * size) / PAIRS


class StepTimeModel:
    """seconds = a + b * decode rows + c * prompt tokens + d * pairs, fitted by recursive least squares.

    Pairs are of a prompt token and one that it attends to, in thousands (`attended_pairs`): far into a long prompt they
    cost more than everything else that a token needs. Old measurements fade (Ljung, "System Identification", ch. 11,
    with a forgetting factor), so the model follows growing contexts of decode rows. Coefficients below zero count as
    zero.

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
        self._weights = [0.0] * 4
        self._covariance = [[self._INITIAL_VARIANCE * (i == j) for j in range(4)] for i in range(4)]
        self._num_steps = 0
        self._swap_page_s: float | None = None
        self.fastest_s = 0.0

    def observe(
        self, num_decode: float, num_prefill: int, seconds: float, *, pairs: float = 0.0, num_swapped: int = 0
    ) -> None:
        """A step with so many decode rows, prompt tokens, pairs and swapped pages took `seconds`.

        Of an iteration of several steps it is the mean one, with the rows it had in the mean.
        """
        if seconds <= 0.0:
            return
        x = (1.0, float(num_decode), float(num_prefill), pairs)
        predicted = sum(map(mul, self._weights, x))
        if num_swapped:
            self._observe_swap(num_swapped, seconds - predicted)
            return
        self.observe_fastest(seconds)
        p = self._covariance
        px = [sum(map(mul, row, x)) for row in p]
        gain_scale = self.FORGETTING + sum(map(mul, x, px))
        error = seconds - predicted
        self._weights = [weight + each / gain_scale * error for weight, each in zip(self._weights, px, strict=True)]
        for row, by_row in zip(p, px, strict=True):
            row[:] = [
                (value - by_row * by_column / gain_scale) / self.FORGETTING
                for value, by_column in zip(row, px, strict=True)
            ]
        # Directions that were not seen for long would grow without bound.
        largest = max(row[i] for i, row in enumerate(p))
        if largest > self._INITIAL_VARIANCE:
            scale = self._INITIAL_VARIANCE / largest
            for row in p:
                row[:] = [value * scale for value in row]

    def observe_fastest(self, seconds: float) -> None:
        """A step without swapped pages took `seconds`: what `fastest_s` needs of it."""
        if seconds > 0.0:
            self.fastest_s = seconds if self._num_steps == 0 else min(self.fastest_s, seconds)
            self._num_steps += 1

    def decode_s(self, num_rows: int) -> float | None:
        """Seconds of a step of decode rows alone, above 0; None while too little was measured to say."""
        if self._num_steps < self.MIN_STEPS:
            return None
        return max(self._weights[0] + self._weights[1] * num_rows, self.fastest_s)

    def prefill_s(self, num_tokens: int) -> float | None:
        """Seconds that a sequence's first so many tokens add; None while too little was measured to say."""
        if not self._knows_prompts:
            return None
        return self._prompt_s(num_tokens, 0)

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

    def left_s(self, target_s: float, num_decode: int) -> float | None:
        """Seconds that an iteration of `target_s` has for prompts beside its decode rows.

        None while too little was measured to say what prompts cost.
        """
        if not self._knows_prompts:
            return None
        return target_s - self._weights[0] - max(self._weights[1], 0.0) * num_decode

    def chunk_within(self, seconds: float, start: int, most: int) -> tuple[int, float]:
        """The prompt tokens, at most `most`, that the seconds suffice for after `start` that are computed.

        Only where `left_s` could say.

        Returns:
          Their number, and the seconds that they take.
        """
        per_token, per_pair = self._prompt_weights(start)
        if seconds <= 0.0:
            return 0, 0.0
        # The root of per_token * n + per_pair * n**2 / 2 = seconds, in the form that takes a per_pair of 0.
        root = 2.0 * seconds / (per_token + math.sqrt(per_token**2 + 2.0 * per_pair * seconds))
        size = min(int(root), most)
        return size, self._prompt_s(size, start)

    @property
    def _knows_prompts(self) -> bool:
        return self._num_steps >= self.MIN_STEPS and max(self._weights[2:]) > 0.0

    def _prompt_weights(self, start: int) -> tuple[float, float]:
        """Seconds of a prompt token after `start` others, and what each one adds to those that follow."""
        per_pair = max(self._weights[3], 0.0) / PAIRS
        return max(self._weights[2], 0.0) + per_pair * start, per_pair

    def _prompt_s(self, size: int, start: int) -> float:
        per_token, per_pair = self._prompt_weights(start)
        return size * (per_token + 0.5 * per_pair * size)

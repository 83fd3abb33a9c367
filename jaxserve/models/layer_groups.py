"""Layer groups: which layers have pages of the KV cache together.

Layers of one window keep the tokens of a request equally long, so pages that only such layers use can be given back as
their window moves on. All pages come from one pool, so groups are of one size. Where the counts of the kinds of layers
do not divide by it, places stay empty: of 22 layers with a window and 4 without, groups of 4 are six and one, with 2
places empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_WASTE = 0.1
"""Share by which empty places may make a request longer in bytes, at any length up to the longest."""
MIN_SAVING = 0.1
"""Share of a longest request's bytes that groups must save."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Layers in groups of equal size.

    Attributes:
      windows: of each group the number of latest tokens that a query sees, itself included; 0: all. Groups of one
        window stand together.
      size: layers of a group, empty places included.
      places: of each layer its group and its place in it.
    """

    windows: tuple[int, ...]
    size: int
    places: tuple[tuple[int, int], ...]

    @property
    def num_unused(self) -> int:
        """Places that no layer has."""
        return self.size * len(self.windows) - len(self.places)


def one_group(windows: Sequence[int | None]) -> LayerGroups:
    """All layers together, under the widest window; `windows` as in `ModelConfig.sliding_windows`."""
    widest = 0 if None in windows else max(window or 0 for window in windows)
    return LayerGroups((widest,), len(windows), tuple((0, layer) for layer in range(len(windows))))


def group_layers(windows: Sequence[int | None], max_model_len: int, page_size: int) -> LayerGroups:
    """The fewest groups that waste little; one, where several would not save a tenth of a longest request's bytes.

    Args:
      windows: of each layer, see `ModelConfig.sliding_windows`.
      max_model_len: most tokens of a request; a window of so many bounds nothing.
      page_size: tokens of a page.
    """
    bounds = [window if window is not None and window < max_model_len else 0 for window in windows]
    layers_of = {bound: [layer for layer, each in enumerate(bounds) if each == bound] for bound in sorted(set(bounds))}
    together = one_group(windows)
    if len(layers_of) == 1:
        return together
    pages = -(-max_model_len // page_size)

    def held(bound: int) -> int:
        """Pages of a longest request that decodes, in one layer."""
        return min(pages, -(-(bound - 1) // page_size) + 1) if bound else pages

    least = sum(len(layers) * held(bound) for bound, layers in layers_of.items())
    sizes = [size for size in range(1, len(windows)) if _waste(layers_of, size, held, least) <= MAX_WASTE]
    size = min(sizes, key=lambda size: (sum(_num_groups(layers_of, size).values()), size))
    needed = sum(size * count * held(bound) for bound, count in _num_groups(layers_of, size).items())
    if needed > (1 - MIN_SAVING) * len(windows) * held(together.windows[0]):
        return together
    group_windows: list[int] = []
    places: dict[int, tuple[int, int]] = {}
    for bound, count in _num_groups(layers_of, size).items():
        first, layers = len(group_windows), layers_of[bound]
        group_windows += [bound] * count
        # By turns, so that in a pattern of windows that repeats the layers of one place in it are mostly one group's.
        places |= {layer: (first + index % count, index // count) for index, layer in enumerate(layers)}
    return LayerGroups(tuple(group_windows), size, tuple(places[layer] for layer in range(len(windows))))


def _waste(layers_of: dict[int, list[int]], size: int, held: Callable[[int], int], least: int) -> float:
    """By which share a request is longer than without empty places: a short one, or one of the greatest length."""
    num_layers = sum(map(len, layers_of.values()))
    num_groups = _num_groups(layers_of, size)
    short = size * sum(num_groups.values()) / num_layers
    long = size * sum(count * held(bound) for bound, count in num_groups.items()) / least
    return max(short, long) - 1


def _num_groups(layers_of: dict[int, list[int]], size: int) -> dict[int, int]:
    return {bound: -(-len(layers) // size) for bound, layers in layers_of.items()}

"""Which layers have pages of the KV cache together."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from jaxserve.models import LayerGroups, group_layers, model_config_from_hf, one_group
from tests.models.tiny_models import FOLDER


def pattern(num_layers: int, every: int, window: int) -> tuple[int | None, ...]:
    """Windows of a model in which the last layer of `every` sees all."""
    return tuple(window if (layer + 1) % every else None for layer in range(num_layers))


SHAPES = [
    # windows, context, groups by window, size, unused places
    ("gemma 3 1b", pattern(26, 6, 512), 32768, {0: 1, 512: 6}, 4, 2),
    ("gemma 3 4b", pattern(34, 6, 1024), 131072, {0: 1, 1024: 6}, 5, 1),
    ("gemma 3 12b", pattern(48, 6, 1024), 131072, {0: 1, 1024: 5}, 8, 0),
    ("gemma 3 27b", pattern(62, 6, 1024), 131072, {0: 1, 1024: 5}, 11, 4),
    ("gemma 2 2b", pattern(26, 2, 4096), 8192, {0: 1, 4096: 1}, 13, 0),
    ("gpt-oss 20b", pattern(24, 2, 128), 131072, {0: 1, 128: 1}, 12, 0),
    ("late windows", (None,) * 20 + (4096,) * 8, 32768, {0: 2, 4096: 1}, 10, 2),
    ("two windows", (128,) * 6 + (1024,) * 6, 32768, {128: 1, 1024: 1}, 6, 0),
]


@pytest.mark.parametrize(("name", "windows", "context", "groups", "size", "unused"), SHAPES, ids=lambda x: str(x)[:12])
def test_groups_of_known_shapes(name, windows, context, groups, size, unused):
    found = group_layers(windows, context, 16)
    assert (Counter(found.windows), found.size, found.num_unused) == (groups, size, unused)
    assert list(found.windows) == sorted(found.windows), "groups of one window do not stand together"
    assert len(set(found.places)) == len(windows), "two layers have one place"
    assert all(0 <= place < size for _, place in found.places)
    assert [found.windows[group] for group, _ in found.places] == [window or 0 for window in windows]


@pytest.mark.parametrize(
    ("windows", "context"),
    [
        ((None,) * 4, 4096),  # nothing is given back
        ((64,) * 4, 4096),  # all alike
        ((None, 4096) * 4, 4096),  # no request is longer than the window
        ((None, 4000) * 4, 4096),  # too little is saved
        ((None,) * 31 + (64,), 4096),  # likewise
        ((4096, 8192), 4000),
    ],
)
def test_one_group_where_several_would_save_nothing(windows, context):
    assert group_layers(windows, context, 16) == one_group(windows)


def test_one_group_is_under_the_widest_window():
    assert one_group((8, 16)) == LayerGroups((16,), 2, ((0, 0), (0, 1)))
    assert one_group((8, None)).windows == (0,)


def test_layers_of_one_place_in_a_pattern_are_one_groups():
    """A scan over the pattern then has one page table for each of its places."""
    found = group_layers(pattern(48, 6, 1024), 131072, 16)
    for offset in range(6):
        assert len({group for group, _ in found.places[offset::6]}) == 1


@pytest.mark.parametrize("name", ["gemma2_softcap", "gemma3_dual_rope", "gpt_oss_sinks"])
def test_the_tiny_models_have_groups(name):
    windows = model_config_from_hf(json.loads((FOLDER / name / "config.json").read_text())).sliding_windows
    found = group_layers(windows, 96, 4)
    assert found.size == 2 and set(found.windows) == {0, 8} and not found.num_unused

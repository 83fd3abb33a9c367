"""Slices: names, shapes, hosts, and how fast their chips can send."""

import pytest

from jaxserve.plan.targets import KINDS, find_slice, slices_of


@pytest.mark.parametrize(
    ("name", "chips", "hosts", "topology"),
    [
        ("v5e-1", 1, 1, "v5e:1x1"),
        ("v5e-8", 8, 1, "v5e:2x4"),
        ("v5e-16", 16, 4, "v5e:4x4"),
        ("v6e-4", 4, 1, "v6e:2x2"),
        ("v6e-8", 8, 1, "v6e:2x4"),
        ("v5p-8", 4, 1, "v5p:2x2x1"),
        ("v5p-16", 8, 2, "v5p:2x2x2"),
        ("h200x1", 1, 1, "1x1x1"),
        ("h200x8", 8, 1, "1x1x8"),
    ],
)
def test_names_of_slices(name, chips, hosts, topology):
    where = find_slice(name)
    assert (where.name, where.num_chips, where.num_hosts, where.topology) == (name, chips, hosts, topology)


@pytest.mark.parametrize("name", ["", "v5e", "v4-8", "h200-8", "h200", "v5ex8", "V5E-8"])
def test_what_is_no_slice_is_refused_with_examples(name):
    with pytest.raises(ValueError, match=r"it must be a slice such as v5e-4, v6e-4, v5p-16, h200x8"):
        find_slice(name)


def test_slices_that_do_not_exist_are_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"'v5e-6', which is no slice; slices of v5e are v5e-1, v5e-4, v5e-8, v5e-16"):
        find_slice("v5e-6")
    with pytest.raises(ValueError, match=r"slices of v5p \(cores, two to a chip\) are v5p-8, v5p-16"):
        find_slice("v5p-4")


def test_a_chip_sends_over_a_port_along_each_axis():
    assert find_slice("v5e-16").link_bandwidth(16) == 2 * 50e9
    assert find_slice("v6e-8").link_bandwidth(8) == 2 * 100e9
    assert find_slice("v5p-8").link_bandwidth(4) == 2 * 100e9
    assert find_slice("v5p-16").link_bandwidth(8) == 3 * 100e9
    assert find_slice("h200x8").link_bandwidth(8) == 450e9
    # Two neighbours of four have one port between them.
    assert find_slice("v5e-4").link_bandwidth(2) == 50e9


def test_each_kind_has_slices_in_ascending_order():
    for kind in KINDS:
        counts = [each.num_chips for each in slices_of(kind)]
        assert counts == sorted(set(counts)) and all(find_slice(each.name) == each for each in slices_of(kind))

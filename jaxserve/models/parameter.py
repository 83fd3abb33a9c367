"""Parameter: what a part of a layer says of each array it holds; parts list them beside their modules."""

from __future__ import annotations

from typing import NamedTuple


class HeadRows(NamedTuple):
    """Rows of every head in a tensor whose rows are heads, one below the other.

    Attributes:
      num_heads, size: heads, and rows of each.
      rows: of each head.
    """

    num_heads: int
    size: int
    rows: range


class Parameter(NamedTuple):
    """One array of a layer.

    Attributes:
      path: keys within the layer, e.g. `("mlp", "up_proj", "kernel")`.
      shape: matrices are [in, out], those of experts [E, in, out], those of heads [H, in, out].
      axes: logical axis of each dimension, see `jaxserve.models.sharding`.
      is_float32: whatever dtype the model has.
      head_rows: what it is of its tensor, where that holds several arrays of every head.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    is_float32: bool = False
    head_rows: HeadRows | None = None


def linear_parameters(
    path: tuple[str, ...], sizes: tuple[int, int], axes: tuple[str | None, str | None], bias: bool
) -> list[Parameter]:
    """Those of a `Linear` at `path`; `sizes` and `axes` are of (in, out)."""
    found = [Parameter((*path, "kernel"), sizes, axes)]
    return [*found, Parameter((*path, "bias"), sizes[1:], axes[1:])] if bias else found


def norm_parameter(path: tuple[str, ...], size: int, axis: str | None = "embed") -> Parameter:
    """That of an `RMSNorm` at `path`."""
    return Parameter((*path, "scale"), (size,), (axis,))

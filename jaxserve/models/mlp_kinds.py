"""Feed-forward blocks by the kind that a layer asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxserve.models.config import ModelConfig
from jaxserve.models.experts import Experts, experts_parameters
from jaxserve.models.mlp import MLP, PlainMLP, dense_parameters, plain_parameters
from jaxserve.models.parameter import Parameter


class MlpKind(NamedTuple):
    """A kind of feed-forward block.

    Attributes:
      module: made from the config; its call takes [T, d] and a `Batch` to [T, d].
      parameters: the arrays it holds, all at paths that begin with "mlp".
    """

    module: Callable[[ModelConfig], Any]
    parameters: Callable[[ModelConfig], list[Parameter]]


MLPS = {
    "dense": MlpKind(MLP, dense_parameters),
    "plain": MlpKind(PlainMLP, plain_parameters),
    "experts": MlpKind(Experts, experts_parameters),
}
"""By name; `jaxserve.models.config.MLP_KINDS` lists the names."""

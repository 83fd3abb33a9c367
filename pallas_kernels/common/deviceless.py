"""Compiling for accelerators that this machine lacks: v5e, v5p, v6e and v7x through libtpu, H200 through the
CUDA wheels.

There is no other GPU: away from a device Mosaic GPU generates code for sm_90a, whatever the target's description says.
A program compiled here went through the device's whole compiler, so registers, on-chip memory and temporary
memory are those it would have. It was not run.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_CONFIGS = Path(__file__).parent / "gpu_targets"


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of device to compile for.

    Attributes:
      name: as used on command lines.
      platform: "tpu" or "cuda".
      topology: libtpu's name of the smallest slice, or XLA's description file of a GPU.
      bandwidth, flops: of HBM in bytes/s and of bfloat16 matrix products in 1/s, as the vendor states them.
      clock: 1/s, highest; of a TPU what follows from `flops` and the size of its matrix units.
      num_cores: multiprocessors, or TPU cores behind one device, that share both.
    """

    name: str
    platform: str
    topology: str
    bandwidth: float
    flops: float
    clock: float
    num_cores: int = 1

    @property
    def implementation(self) -> str:
        """The kernels for this kind of device."""
        return "mosaic_tpu" if self.platform == "tpu" else "mosaic_gpu"


TARGETS = {
    target.name: target
    for target in (
        Target("v5e", "tpu", "v5e:2x2", 0.82e12, 197e12, 1.5e9),
        Target("v5p", "tpu", "v5p:2x2x1", 2.77e12, 459e12, 1.75e9, 2),
        Target("v6e", "tpu", "v6e:2x2", 1.64e12, 918e12, 1.75e9),
        Target("v7x", "tpu", "tpu7x:2x2x1", 3.69e12, 1153e12, 2.2e9),
        Target("sm_90a", "cuda", "h200.pbtxt", 4.8e12, 989e12, 1.98e9, 132),
    )
}
"""Targets by name. A v7x device is one of a chip's two cores, so its figures are half of the chip's."""


def missing(target: Target) -> str:
    """What has to be installed to compile for `target`; empty if nothing."""
    package = "libtpu" if target.platform == "tpu" else "jax_cuda13_plugin"
    if importlib.util.find_spec(package):
        return ""
    extra = "pip install libtpu" if target.platform == "tpu" else "EXTRAS=dev,cuda13 make venv"
    return f"{package} is not installed: {extra}"


@lru_cache
def devices(target: Target, topology: str | None = None) -> tuple[Any, ...]:
    """Devices of `target` that can be compiled for and nothing else.

    Args:
      topology: of a larger slice, as libtpu names it ("v5e:4x4"); of GPUs, as XLA counts them: hosts, hosts, devices of
        one ("1x1x8"). None: the smallest slice, one GPU.

    Raises:
      ImportError: the compiler is not installed.
    """
    if missing(target):
        raise ImportError(missing(target))
    if target.platform == "tpu":
        # The lock keeps two processes off one TPU; there is none.
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        return tuple(topologies.get_topology_desc(platform="tpu", topology_name=topology or target.topology).devices)
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    config = (_CONFIGS / target.topology).read_text()
    found = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=config, topology=topology or "1x1x1"
    ).devices
    return tuple(found)


def make_mesh(target: Target, size: int = 1) -> Mesh:
    """A mesh ("data", "model") of shape (1, size) over devices of `target`."""
    return Mesh(np.asarray(devices(target)[:size]).reshape(1, size), ("data", "model"))


@contextmanager
def without_compile_cache() -> Iterator[None]:
    """Nothing is looked up in jax's persistent compilation cache meanwhile.

    A program for an absent device is written there, and what reads it back wants the device.
    """
    was_on = jax.config.jax_enable_compilation_cache
    try:
        _switch_cache(False)
        yield
    finally:
        _switch_cache(was_on)


def _switch_cache(on: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", on)
    compilation_cache.reset_cache()  # jax asks for the setting once


def compile_for(
    target: Target, function: Callable[..., Any], args: Any, *, donate: tuple[int, ...] = (), mesh: Mesh | None = None
) -> Any:
    """`function` compiled for `target`.

    Args:
      args: ShapeDtypeStructs; those without a sharding are on every device of the mesh.
      donate: numbers of arguments whose memory results take over.
      mesh: of `make_mesh`; one device when None.

    Returns:
      A compiled program: `as_text`, `memory_analysis`, `cost_analysis`; it cannot be called.
    """
    mesh = make_mesh(target) if mesh is None else mesh
    everywhere = NamedSharding(mesh, PartitionSpec())

    def placed(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or everywhere)

    # Kernels ask the mesh for which kind of device they are traced.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), without_compile_cache():
        traced = jax.jit(function, donate_argnums=donate).trace(*jax.tree.map(placed, args))
        return traced.lower(lowering_platforms=(target.platform,)).compile()

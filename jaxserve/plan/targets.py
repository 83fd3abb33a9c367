"""Targets: slices of accelerators by name, and what their makers publish of them.

Names and shapes of slices:

- v5e-N, v6e-N: N chips, one TensorCore each. https://cloud.google.com/tpu/docs/v5e, https://cloud.google.com/tpu/docs/v6e
- v5p-N: N TensorCores, two to a chip, so v5p-16 has 8 chips. https://cloud.google.com/tpu/docs/v5p
- h200xN: N GPUs of one host, joined by NVSwitch.

A device is a chip, of v5p too, whose two cores are one device to JAX. Up to 8 chips of v5e and v6e are one host's;
larger slices have hosts of 4 chips, as v5p has.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from jax.sharding import Mesh

from jaxserve.models import ModelConfig
from jaxserve.runtime import mesh_of
from jaxserve.sim.roofline import CHIPS, Chip
from pallas_kernels.common import deviceless


@dataclass(frozen=True, slots=True)
class Link:
    """What joins the chips of a slice.

    Attributes:
      name: of the interconnect.
      bandwidth: bytes/s that one chip sends over one of its ports, one way.
      ports: of a chip.
    """

    name: str
    bandwidth: float
    ports: int


_LINKS = {
    # Per chip and both ways, as the pages above say: 400, 800 and 1200 GB/s, over 4, 4 and 6 ports.
    "v5e": Link("ICI", 400e9 / 2 / 4, 4),
    "v6e": Link("ICI", 800e9 / 2 / 4, 4),
    "v5p": Link("ICI", 1200e9 / 2 / 6, 6),
    # NVIDIA H200 data sheet: NVLink 900 GB/s per GPU, both ways together, into a switch.
    "h200": Link("NVLink", 900e9 / 2, 1),
}
_SHAPES: dict[str, dict[int, tuple[int, ...]]] = {
    "v5e": {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16)},
    "v5p": {8: (2, 2, 1), 16: (2, 2, 2), 32: (2, 2, 4), 64: (2, 4, 4), 128: (4, 4, 4), 256: (4, 4, 8)},
    "h200": {1: (1,), 2: (2,), 4: (4,), 8: (8,)},
}
_SHAPES["v6e"] = _SHAPES["v5e"]
KINDS = ("v5e", "v6e", "v5p", "h200")
_NAME = re.compile(r"(v5e|v6e|v5p)-(\d+)|(h200)x(\d+)")


@dataclass(frozen=True, slots=True)
class AbsentDevice:
    """Stands for a device in a mesh that shapes are worked out on; nothing can be compiled for it."""

    id: int
    platform: str
    device_kind: str = "absent"
    num_cores: int = 1
    compute_capability: str = "9.0"


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice of accelerators.

    Attributes:
      name: as on the command line.
      kind: of chip, one of `KINDS`.
      shape: chips along each axis of the interconnect.
    """

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        """Devices."""
        return math.prod(self.shape)

    @property
    def num_hosts(self) -> int:
        """Hosts, see the module."""
        if self.kind == "h200" or (self.kind != "v5p" and self.num_chips <= 8):
            return 1
        return -(-self.num_chips // 4)

    @property
    def platform(self) -> str:
        """As JAX names it."""
        return "gpu" if self.kind == "h200" else "tpu"

    @property
    def chip(self) -> Chip:
        """One device's published figures."""
        return CHIPS[self.kind]

    @property
    def topology(self) -> str:
        """As the compiler names it."""
        if self.kind == "h200":
            return f"1x1x{self.num_chips}"
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def compile_target(self) -> deviceless.Target:
        """What its programs are compiled for."""
        return deviceless.TARGETS["sm_90a" if self.kind == "h200" else self.kind]

    @property
    def link(self) -> Link:
        """What joins its chips."""
        return _LINKS[self.kind]

    def link_bandwidth(self, num_devices: int) -> float:
        """Bytes/s that each of the first so many chips can send, one way: a port along each axis with several of them.

        Slices are taken to have no links around their ends, so the chips in the corners have no more.
        """
        ports, rows = 0, num_devices
        for size in reversed(self.shape):
            ports += min(rows, size) > 1
            rows = -(-rows // size)
        return self.link.bandwidth * max(1, ports)

    def absent_mesh(self, size: int, model: ModelConfig) -> Mesh:
        """The engine's mesh for a model, of `size` absent devices."""
        return mesh_of([AbsentDevice(number, self.platform) for number in range(size)], model)

    def compile_mesh(self, size: int, model: ModelConfig) -> Mesh:
        """The same of devices that can be compiled for.

        Raises:
          ImportError: the compiler is not installed.
        """
        return mesh_of(deviceless.devices(self.compile_target, self.topology)[:size], model)


def slices_of(kind: str) -> list[Slice]:
    """All known slices of a kind of chip, smallest first."""
    between = "x" if kind == "h200" else "-"
    return [Slice(f"{kind}{between}{count}", kind, shape) for count, shape in _SHAPES[kind].items()]


def find_slice(name: str) -> Slice:
    """The slice of a name.

    Raises:
      ValueError: there is none, naming those of its kind.
    """
    matched = _NAME.fullmatch(name)
    kind = matched and (matched[1] or matched[3])
    if not kind:
        examples = ", ".join(slices_of(each)[-1 if each == "h200" else 1].name for each in KINDS)
        raise ValueError(f"target is {name!r}; it must be a slice such as {examples}")
    for each in slices_of(kind):
        if each.name == name:
            return each
    known = ", ".join(each.name for each in slices_of(kind))
    counted = " (cores, two to a chip)" if kind == "v5p" else ""
    raise ValueError(f"target is {name!r}, which is no slice; slices of {kind}{counted} are {known}")

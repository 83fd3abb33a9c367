"""Which accelerators each replica of this machine gets, as environment variables; nothing here loads jax.

GPUs are split by `CUDA_VISIBLE_DEVICES`. TPU chips are split by `TPU_VISIBLE_CHIPS`, with the bounds that libtpu wants
for processes that do not talk to each other, and a port each for its controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxserve.config.router_flags import DEVICE_KINDS

AUTO, NONE, GPU, TPU = DEVICE_KINDS
_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""Of so many chips side by side in one process."""
_TPU_PORT = 8476


def device_environments(
    kind: str, num_replicas: int, per_replica: int, environment: Mapping[str, str], root: Path = Path("/")
) -> list[dict[str, str]]:
    """The variables of each replica; empty where all see the same devices.

    Args:
      kind: one of `DEVICE_KINDS`; "auto": GPUs if there are any, else TPU chips, else none.
      per_replica: devices of each.
      environment: of this process; devices that it hides stay hidden.
      root: of the file system that devices are looked for in.

    Raises:
      ValueError: there are too few, or no process may have so many chips.
    """
    if kind == AUTO:
        kind = GPU if gpus(environment, root) else TPU if tpu_chips(environment, root) else NONE
    if kind == NONE:
        return [{} for _ in range(num_replicas)]
    found = gpus(environment, root) if kind == GPU else tpu_chips(environment, root)
    if len(found) < num_replicas * per_replica:
        raise ValueError(
            f"num_replicas is {num_replicas} with {per_replica} devices each (devices_per_replica); this machine shows"
            f" {len(found)} of kind {kind}: lower one of them, or set replica_devices=none to let all see the same"
        )
    shares = [found[first : first + per_replica] for first in range(0, num_replicas * per_replica, per_replica)]
    if kind == GPU:
        return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]
    if per_replica not in _TPU_BOUNDS:
        raise ValueError(f"devices_per_replica is {per_replica}; of TPU chips it must be one of 1, 2, 4, 8")
    return [_tpu_environment(share, number) for number, share in enumerate(shares)]


def gpus(environment: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Numbers or ids of the NVIDIA GPUs that this process may use."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        return _listed(environment["CUDA_VISIBLE_DEVICES"])
    folder = root / "proc/driver/nvidia/gpus"
    return [str(number) for number in range(len(list(folder.iterdir())) if folder.is_dir() else 0)]


def tpu_chips(environment: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Numbers of the TPU chips that this process may use."""
    if "TPU_VISIBLE_CHIPS" in environment:
        return _listed(environment["TPU_VISIBLE_CHIPS"])
    devices = list((root / "dev").glob("accel[0-9]*")) or list((root / "dev/vfio").glob("[0-9]*"))
    return [str(number) for number in range(len(devices))]


def _listed(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip() not in ("", "-1")]


def _tpu_environment(chips: Sequence[str], number: int) -> dict[str, str]:
    port = _TPU_PORT + number
    return {
        "TPU_VISIBLE_CHIPS": ",".join(chips),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": _TPU_BOUNDS[len(chips)],
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_MESH_CONTROLLER_ADDRESS": f"localhost:{port}",
        "TPU_MESH_CONTROLLER_PORT": str(port),
    }

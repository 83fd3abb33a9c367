"""What a measurement ran on. Loads no jax itself: it need not be loaded to say that it was not used."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import version
from typing import Any

import jaxserve


def device_name() -> str:
    """The kind of the default device, with the count of cores where that says more."""
    jax = _jax()
    if jax is None or jax.default_backend() == "cpu":
        return f"cpu, {os.cpu_count()} cores"
    return str(jax.devices()[0].device_kind)


def machine() -> dict[str, Any]:
    """What the figures were measured on.

    Nothing of devices is there for a measurement that did not load jax. `load_average` is of the last 1, 5 and 15
    minutes at the end, the measurement's own share included: far above the number of cores, something else ran
    beside it. `cpu` and `cpu_features` (of vectors and matrices) are there where the system tells them.
    """
    jax = _jax()
    devices = {}
    if jax is not None:
        devices = {
            "device": jax.devices()[0].device_kind,
            "platform": jax.default_backend(),
            "num_devices": jax.device_count(),
            "jax": version("jax"),
        }
    return devices | {
        "cpu_cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "jaxserve": jaxserve.__version__,
        **_cpu(),
    }


def _cpu() -> dict[str, Any]:
    try:
        with open("/proc/cpuinfo") as lines:
            fields = dict((part.strip() for part in line.partition(":")[::2]) for line in lines if ":" in line)
    except OSError:
        return {}
    features = [name for name in fields.get("flags", "").split() if name.startswith(("avx", "amx"))]
    return {
        "cpu": fields.get("model name", ""),
        "cpu_features": features,
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
    }


def _jax() -> Any:
    """jax where the measurement loaded it, else None."""
    return sys.modules.get("jax")

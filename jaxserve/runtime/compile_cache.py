"""The persistent compilation cache: a second start loads programs instead of compiling them."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def cache_root() -> Path:
    """The folder for everything jaxserve keeps: `JAXSERVE_CACHE`, else `~/.cache/jaxserve`."""
    return Path(os.environ.get("JAXSERVE_CACHE") or Path.home() / ".cache" / "jaxserve")


def enable_compile_cache(folder: str | None) -> Path | None:
    """Turns the cache on for this process.

    Args:
      folder: where; None: under `cache_root()`; "": nothing is changed.

    Returns:
      The folder, or None when nothing was changed.
    """
    if folder == "":
        return None
    path = Path(folder) if folder else cache_root() / "xla"
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path

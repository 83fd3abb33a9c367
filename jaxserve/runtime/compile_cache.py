"""The persistent compilation cache: a second start loads programs instead of compiling them."""

from __future__ import annotations

from pathlib import Path

import jax

from jaxserve.config.cache_folder import cache_directory


def enable_compile_cache(folder: str | None) -> Path | None:
    """Turns the cache on for this process.

    Args:
      folder: where; None: under `cache_directory()`; "": nothing is changed.

    Returns:
      The folder, or None when nothing was changed.
    """
    if folder == "":
        return None
    path = Path(folder) if folder else cache_directory() / "xla"
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path

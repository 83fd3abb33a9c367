"""The cache folder: `JAXSERVE_CACHE`, else `~/.cache/jaxserve`."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """The folder for downloads; made when something is put there."""
    configured = os.environ.get("JAXSERVE_CACHE")
    if configured:
        return Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jaxserve"

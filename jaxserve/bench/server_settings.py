"""Settings of an engine from a command line of the server, as `--settings` gives them."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.config.flags import engine_config_from_flags, parse_flags


def read_server_settings(settings: str, *, taken: Collection[str]) -> dict[str, Any]:
    """The fields of `EngineConfig` that a command line of `jaxserve.server` sets to something else than the default.

    Args:
      taken: fields that the measurement sets itself.

    Raises:
      ValueError: a flag is unknown, has a bad value, or sets a field that is taken.
    """
    words = shlex.split(settings)
    config = engine_config_from_flags(parse_flags("server", ["bench", "--model=", "--log_level=warning", *words]))
    changed = {f.name: getattr(config, f.name) for f in fields(EngineConfig) if getattr(config, f.name) != f.default}
    changed.pop("model", None)
    both = sorted(changed.keys() & set(taken))
    if both:
        raise ValueError(f"--settings={settings!r} sets {', '.join(both)}, which the measurement sets itself")
    return changed

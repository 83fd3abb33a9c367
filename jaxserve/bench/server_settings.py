"""Settings of an engine from a command line of the server, as `--settings` gives them."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.config.flags import engine_config_from_flags, parse_flags


def read_server_settings(settings: str, *, taken: Collection[str]) -> dict[str, Any]:
    """The fields of `EngineConfig` that a command line of `jaxserve.server` sets.

    Args:
      taken: fields that the measurement sets itself.

    Raises:
      ValueError: a flag is unknown, has a bad value, or sets a field that is taken.
    """
    flags = parse_flags("server", ["bench", *shlex.split(settings)])
    config = engine_config_from_flags(flags)
    given = {each.name for each in fields(EngineConfig) if each.name in flags and flags[each.name].present}
    both = sorted(given & set(taken))
    if both:
        raise ValueError(f"--settings={settings!r} sets {', '.join(both)}, which the measurement sets itself")
    return {name: getattr(config, name) for name in given}

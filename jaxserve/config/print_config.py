"""What `--print_config` prints: the settings a command line comes down to, as a flagfile or as JSON.

Keys, and passwords within addresses, are never printed. A setting whose value came from a file is printed as that file.
"""

from __future__ import annotations

import json
import re
from typing import Any

from absl import flags as absl_flags
from absl.flags import BooleanParser

from jaxserve.config.flag import Flag
from jaxserve.config.flag_parsers import FromFile, RepeatedParser
from jaxserve.config.flags import flags_of

_QUESTIONS = frozenset(("print_config", "dry_run"))
_SECRETS = frozenset(("api_key", "replica_api_key"))


def settings_as_flagfile(command: str, values: absl_flags.FlagValues) -> str:
    """A line per flag, in the order of `--help`; what is not set, or secret, is a comment."""
    lines: list[str] = []
    heading = ""
    for flag in flags_of(command):
        if flag.name in _QUESTIONS:
            continue
        if flag.heading != heading:
            heading = flag.heading
            lines += ["", f"# {heading}"] if lines else [f"# {heading}"]
        value = values[flag.name].value
        is_list = isinstance(flag.parser, RepeatedParser) and bool(value)
        lines += [_flag_line(flag, each) for each in (list(value or ()) if is_list else [value])]
    return "\n".join(lines)


def settings_as_json(command: str, values: absl_flags.FlagValues) -> str:
    """One object on one line: flag to value; what is not set is null, a secret that is set is true."""
    settings = {
        flag.name: _json_value(flag, values[flag.name].value)
        for flag in flags_of(command)
        if flag.name not in _QUESTIONS
    }
    return json.dumps(settings)


def _flag_line(flag: Flag, value: Any) -> str:
    if value is None or value in ((), []):
        return f"# --{flag.name}: not set"
    if flag.name in _SECRETS:
        return f"# --{flag.name}: set, and not shown"
    if isinstance(flag.parser, BooleanParser):
        return f"--{'' if value else 'no'}{flag.name}"
    if isinstance(value, FromFile):
        return f"--{flag.name}={value.path}"
    return f"--{flag.name}={','.join(map(str, value)) if isinstance(value, tuple) else _without_credentials(value)}"


def _json_value(flag: Flag, value: Any) -> Any:
    if flag.name in _SECRETS:
        return True if value else None
    if isinstance(value, FromFile):
        return value.path
    return list(value) if isinstance(value, tuple) else _without_credentials(value)


def _without_credentials(value: Any) -> Any:
    """An address without the user and password that it may hold; anything else as it is."""
    return re.sub(r"(?<=://)[^/@\s]*@", "", value) if isinstance(value, str) else value

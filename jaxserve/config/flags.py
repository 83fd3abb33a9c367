"""Command lines: parsing the flags of a command and making settings of them.

    flags = parse_flags("server", sys.argv)      # exits non-zero on a bad value, 0 after --help
    config = engine_config_from_flags(flags)
    flags.http_port

The flags of an engine are the fields of `EngineConfig`, with its defaults and its rules. Names may be
written with dashes or underscores. A command's flags live in a registry of their own, not in absl's
global one, so `--help` lists them alone and several commands may be parsed in one process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

from absl import flags as absl_flags
from absl import logging

from jaxserve.config.engine_config import EngineConfig
from jaxserve.config.flag import Flag
from jaxserve.config.flag_parsers import RepeatedParser
from jaxserve.config.flag_table import FLAGS
from jaxserve.config.routing_config import RoutingSettings
from jaxserve.faults import read_fault_plan, use_fault_plan

SUMMARIES = {
    "server": "Serves a model over HTTP (OpenAI-compatible) and gRPC.",
    "router": "Spreads requests over several servers, by what each has cached and how loaded it is; HTTP only.",
    "batch": "Answers a file of requests in OpenAI's batch format; a rerun goes on where the last run stopped.",
    "bench": "Measures speed. WHAT is the first argument: offline, serve, compare, compare_modes, machine,"
    " decode_ratio, startup, scheduler, simulation, preemption, structured, sse, buckets,"
    " decode_steps, host_work, quality, lora, recovery, overload, connections or outages.",
    "replay": "Feeds a recorded trace to the scheduler and compares what it decides. Exits 1 at the first difference.",
    "doctor": "Names the bottleneck of a recorded trace or of a running server, with the figures that show it.",
    "top": "Shows a running server: requests, tokens, queue, KV pages, slots, latencies; anew every second.",
    "simulate": "Runs the serving scheduler under a simulated clock, without a model or a device.",
    "plan": "Tells whether a model fits a slice of accelerators, and bounds on its speed, without the hardware.",
    "convert": "Writes a checkpoint as another: safetensors, Orbax or GGUF.",
    "fit_cost_model": "Fits the simulator's linear cost model to the trace of an engine.",
    "field_figures": "Computes the scheduling field's well-known figures with the serving scheduler, as a table.",
}
USAGES = {
    "server": "python -m jaxserve.server",
    "router": "python -m jaxserve.router",
    "batch": "python -m jaxserve.batch",
    "bench": "python -m jaxserve.bench WHAT",
    "replay": "python -m jaxserve.replay",
    "doctor": "python -m jaxserve.doctor",
    "top": "python -m jaxserve.top",
    "simulate": "python -m jaxserve.simulate",
    "plan": "python -m jaxserve.plan",
    "convert": "tools/convert_checkpoint",
    "fit_cost_model": "tools/fit_cost_model TRACE",
    "field_figures": "tools/field_figures",
}
_HOST_TEXTS = ("coordinator_address", "control_address", "host_token_file")
_EXIT_USAGE = 2
_WIDTH = 100


def parse_flags(command: str, argv: Sequence[str]) -> absl_flags.FlagValues:
    """Parses a command line, sets the log level and sends logs to stderr.

    Args:
      command: a key of `SUMMARIES`.
      argv: the program's name, then its arguments.

    Returns:
      The command's flags, as attributes.

    Raises:
      SystemExit: 0 after `--help` or `--version`; non-zero on a bad argument, after naming flag and rule.
    """
    values = _registry(command)
    try:
        words = _spelled(values, _with_flagfiles(values, _spelled(values, argv)))
        _answer_questions(command, words[1:])
        rest = values(words)[1:]
    except absl_flags.UnrecognizedFlagError as error:
        # absl's message ends in the names it may be mistaken for.
        exit_with(str(error).removeprefix("ERROR:: "))
    except absl_flags.Error as error:
        exit_with(str(error).removeprefix("ERROR:: "))
    if rest:
        exit_with(f"unexpected argument {rest[0]!r}; flags are written --name=value")
    if "api_key" in values:
        _take_api_key(values)
    absl_flags.FLAGS.mark_as_parsed()
    logging.use_absl_handler()
    logging.set_verbosity(values.log_level)
    return values


def engine_config_from_flags(values: absl_flags.FlagValues) -> EngineConfig:
    """The engine's settings.

    Raises:
      SystemExit: settings that break a rule, after naming them.
    """
    settings: dict[str, Any] = {
        field.name: values[field.name].value for field in fields(EngineConfig) if field.name in values
    }
    for name in ("tokenizer", "chat_template", "served_model_name", "trace_file", "crash_dump_dir", *_HOST_TEXTS):
        settings[name] = settings[name] or None
    try:
        return EngineConfig(**settings)
    except ValueError as error:
        exit_with(f"--{error}")


def routing_settings_from_flags(values: absl_flags.FlagValues) -> RoutingSettings:
    """How a router chooses, of `router` and `simulate`.

    Raises:
      ValueError: settings that break a rule, which it names.
    """
    names = {"policy": "routing_policy"}
    settings: dict[str, Any] = {
        field.name: values[names.get(field.name, field.name)].value for field in fields(RoutingSettings)
    }
    return RoutingSettings(**settings)


def follow_fault_plan(flags: absl_flags.FlagValues) -> None:
    """Makes this process' failpoints follow `--fault_plan`, if one is given.

    Raises:
      SystemExit: 2, when fault plans are not allowed here or it is none.
    """
    if flags.fault_plan:
        try:
            use_fault_plan(read_fault_plan(flags.fault_plan))
        except ValueError as error:
            exit_with(f"--{error}")


def exit_with(message: str) -> NoReturn:
    """Ends the program over a mistake of the caller's.

    Raises:
      SystemExit: always, non-zero.
    """
    print(f"error: {message}\nEvery flag is listed by --help.", file=sys.stderr)
    raise SystemExit(_EXIT_USAGE)


def help_text(command: str) -> str:
    """What `--help` prints: every flag of a command, by heading."""
    by_heading: dict[str, list[Flag]] = {}
    for flag in flags_of(command):
        by_heading.setdefault(flag.heading, []).append(flag)
    lines = [SUMMARIES[command], "", f"Usage: {USAGES[command]} [--flag=value ...]"]
    for heading, flags in by_heading.items():
        lines += ["", f"{heading}:"]
        for flag in flags:
            is_bool = isinstance(flag.parser, absl_flags.BooleanParser)
            lines.append(f"  --[no]{flag.name}" if is_bool else f"  --{flag.name}=<{flag.parser.flag_type()}>")
            default = "" if flag.default in (None, "", ()) else f" (default: {_shown(flag.default)})"
            indent = " " * 6
            lines += textwrap.wrap(f"{flag.help}{default}", _WIDTH, initial_indent=indent, subsequent_indent=indent)
    lines += [
        "",
        "Names may be written with dashes or underscores. --flagfile=FILE reads flags from a file, one a line.",
        "JAXSERVE_CACHE: folder of the demo model and of compiled programs (default: ~/.cache/jaxserve).",
    ]
    return "\n".join(lines)


def flags_of(command: str) -> list[Flag]:
    """The flags a command takes, in the order of `--help`."""
    return [flag for flag in FLAGS if command in flag.commands]


def _registry(command: str) -> absl_flags.FlagValues:
    values = absl_flags.FlagValues()  # type: ignore[no-untyped-call]
    absl_flags.DEFINE_string("flagfile", "", "", flag_values=values)
    for flag in flags_of(command):
        if isinstance(flag.parser, absl_flags.BooleanParser):
            absl_flags.DEFINE_boolean(flag.name, flag.default, flag.help, flag_values=values)
        elif isinstance(flag.parser, RepeatedParser):
            as_text: absl_flags.ArgumentSerializer[str] = absl_flags.ArgumentSerializer()
            absl_flags.DEFINE_multi(flag.parser, as_text, flag.name, flag.default, flag.help, flag_values=values)
        else:
            absl_flags.DEFINE(flag.parser, flag.name, flag.default, flag.help, flag_values=values)
    return values


def _with_flagfiles(values: absl_flags.FlagValues, words: Sequence[str]) -> list[str]:
    try:
        return list(values.read_flags_from_files(words, force_gnu=True))
    except OSError as error:
        exit_with(f"--flagfile: {error}")


def _answer_questions(command: str, words: Sequence[str]) -> None:
    """Ends the program with success after printing what `--help` or `--version` ask for."""
    if {"--help", "-h", "-help", "--helpfull"} & set(words):
        with contextlib.suppress(BrokenPipeError):  # a reader like `head` has seen enough
            print(help_text(command), flush=True)
        raise SystemExit(0)
    if "--version" in words:
        from jaxserve import __version__

        print(__version__)
        raise SystemExit(0)


def _spelled(values: absl_flags.FlagValues, words: Sequence[str]) -> list[str]:
    """`words` with dashes inside flag names turned into underscores, `--no-x` into `--nox`; values are kept."""
    spelled = [words[0]]
    is_value = False
    for index, word in enumerate(words[1:], 1):
        if is_value or not word.startswith("--"):
            spelled.append(word)
            is_value = False
            continue
        if word == "--":
            return [*spelled, *words[index:]]
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if name not in values and name.startswith("no_") and name[3:] in values:
            name = f"no{name[3:]}"
        spelled.append(f"--{name}{equals}{value}")
        is_value = not equals and name in values and not values[name].boolean
    return spelled


def _take_api_key(values: absl_flags.FlagValues) -> None:
    key: str | None = values.api_key
    if key is None:
        values["api_key"].value = os.environ.get("JAXSERVE_API_KEY") or None
    elif not key:
        exit_with("--api_key is empty; give a key, or leave the flag out to serve without one")


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)

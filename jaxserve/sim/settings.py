"""From flags to the scheduler's settings. The names come from `SchedulerConfig` itself, so none is listed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from absl.flags import FlagValues

from jaxserve.config import SchedulerConfig
from jaxserve.config.engine_config import check_page_size
from jaxserve.config.flag_table import FLAGS

SETTINGS = tuple(field.name for field in fields(SchedulerConfig))
"""Every setting of the scheduler; each is a flag."""


def given_settings(flags: FlagValues) -> dict[str, Any]:
    """Settings that the command line names itself."""
    return {name: flags[name].value for name in SETTINGS if flags[name].present}


def scheduler_config(
    flags: FlagValues, *, max_model_len: int, num_pages: int | None, changes: Mapping[str, Any] | None = None
) -> SchedulerConfig:
    """The scheduler's settings for a workload.

    Args:
      max_model_len: where the flag is not given.
      num_pages: where the flag is not given; None: every slot's longest request fits.
      changes: settings that replace the flags'.

    Raises:
      ValueError: settings that break a rule.
    """
    settings: dict[str, Any] = {name: flags[name].value for name in SETTINGS}
    settings |= changes or {}
    check_page_size(settings["page_size"])
    if settings["max_model_len"] is None:
        settings["max_model_len"] = max(max_model_len, 2)
    budget = settings["max_num_batched_tokens"]
    chunk = settings["prefill_chunk"] or budget
    if not flags.enable_chunked_prefill:
        chunk = budget
        if budget < settings["max_model_len"]:
            raise ValueError(
                f"max_num_batched_tokens is {budget} and max_model_len is {settings['max_model_len']};"
                " without chunked prefill the token budget must hold a whole prompt"
            )
    settings["prefill_chunk"] = min(chunk, budget)
    if settings["num_pages"] is None:
        limits = SchedulerConfig(**settings | {"num_pages": 2})
        settings["num_pages"] = num_pages or limits.max_num_seqs * limits.most_pages_per_seq + 1
    return SchedulerConfig(**settings)


def parse_sweep(text: str, flag: str = "sweep") -> tuple[str, dict[str, Any]]:
    """`name=value,value,...` with the name of a scheduler flag and values by its own parser.

    Returns:
      The name; and the values by the texts they were given as.

    Raises:
      ValueError: naming the flag and the rule.
    """
    name, equals, values = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    parsers = {flag.name: flag.parser for flag in FLAGS if "simulate" in flag.commands and flag.name in SETTINGS}
    if name not in parsers or not equals:
        raise ValueError(f"{flag} is {text!r}; it must be NAME=VALUE,VALUE with one of {', '.join(sorted(parsers))}")
    try:
        return name, {value.strip(): parsers[name].parse(value.strip()) for value in values.split(",")}
    except ValueError as error:
        raise ValueError(f"{flag} is {text!r}; a value of {name} {error}") from None

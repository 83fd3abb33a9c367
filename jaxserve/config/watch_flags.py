"""The flags of an engine's watchdog and end, as `flag_table` lists an engine's: name, parser, help."""

from __future__ import annotations

from typing import Any

from absl.flags import ArgumentParser, BooleanParser

from jaxserve.config.flag import flags_for
from jaxserve.config.flag_parsers import FloatParser, TextParser

HEADING = "When something goes wrong"
DEATH_FLAGS = flags_for(
    "server",
    HEADING,
    ("exit_on_death", BooleanParser(), True, "end the process, with 1, when its engine has died; else answer 503"),
)
WATCH_FLAGS: tuple[tuple[str, ArgumentParser[Any], str], ...] = (
    (
        "step_timeout_s",
        FloatParser(low=0),
        "seconds without a step, while there is work, until requests fail and health is 503; 0: never",
    ),
    ("stuck_exit_s", FloatParser(low=0), "further seconds of that until the engine is dead; 0: never"),
    ("startup_timeout_s", FloatParser(low=0), "seconds without progress of a start until it has failed; 0: never"),
    (
        "crash_dump_dir",
        TextParser(),
        "folder for a trace of the last iterations, if the engine dies; default: none is kept",
    ),
)

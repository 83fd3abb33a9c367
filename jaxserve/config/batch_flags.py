"""Flags of `batch` beside the engine's."""

from __future__ import annotations

from absl.flags import BooleanParser

from jaxserve.config.bench_flags import LOG_LEVELS
from jaxserve.config.flag import flags_for
from jaxserve.config.flag_parsers import ChoiceParser, FloatParser, IntParser, TextParser

OUTPUT_ORDERS = ("completion", "input")

BATCH_FLAGS = flags_for(
    "batch",
    "Batch",
    ("input", TextParser(), None, "file of requests, one JSON object a line in OpenAI's batch format"),
    ("output", TextParser(), None, "file of results, a line each; a rerun goes on behind those that are there"),
    ("output_order", ChoiceParser(OUTPUT_ORDERS), "completion", "write results as they come, or in input order"),
    (
        "window",
        IntParser(low=1),
        None,
        "most lines in progress; default: 4 * max_num_seqs, or what runs and waits at most",
    ),
    ("max_line_bytes", IntParser(low=1), 8 << 20, "longest line of the input"),
    ("allow_changed_input", BooleanParser(), False, "go on though the output has custom_ids that the input lacks"),
    ("fail_on_error", BooleanParser(), False, "exit with 3 when a line has an error"),
    (
        "drain_grace_s",
        FloatParser(low=0),
        30.0,
        "seconds that lines in progress get after SIGINT or SIGTERM",
    ),
    ("log_level", ChoiceParser(LOG_LEVELS), "warning", "least level that is logged"),
)

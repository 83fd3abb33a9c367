"""Flags of `plan` beside those of the engine and of the roofline."""

from __future__ import annotations

from absl.flags import BooleanParser

from jaxserve.config.bench_flags import LOG_LEVELS
from jaxserve.config.flag import flags_for
from jaxserve.config.flag_parsers import ChoiceParser, IntParser, TextParser

PLANNED = frozenset(
    (
        "dtype",
        "kv_cache_dtype",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "memory_fraction",
        "page_size",
        "prefill_chunk",
        "quantization",
    )
)
"""Engine flags that `plan` takes too: those that decide sizes."""

PLAN_FLAGS = flags_for(
    "plan",
    "Plan",
    ("model_config", TextParser(), None, "a model of configs/models by name, a config.json, or its directory"),
    ("target", TextParser(), None, "slice to plan for: v5e-16, v6e-8, v5p-16 (cores), h200x8 and so on"),
    ("tensor_parallel_size", IntParser(low=1), None, "devices that share the model; default: all of the target's"),
    ("compile", BooleanParser(), True, "compile the largest steps for the target; without: arithmetic alone"),
    ("context", IntParser(low=1), 1024, "tokens of context of each decode row in the roofline"),
    ("json", BooleanParser(), False, "print the plan as JSON"),
    ("output", TextParser(), None, "write the plan to this file too, as JSON"),
    ("log_level", ChoiceParser(LOG_LEVELS), "warning", "least level that is logged"),
)

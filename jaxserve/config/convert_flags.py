"""Flags of `convert`."""

from __future__ import annotations

from absl.flags import BooleanParser

from jaxserve.config.bench_flags import LOG_LEVELS
from jaxserve.config.flag import flags_for
from jaxserve.config.flag_parsers import ChoiceParser, FloatParser, TextParser

FORMATS = ("safetensors", "orbax", "gguf")
CONVERT_DTYPES = ("auto", "float32", "bfloat16", "float16", "q8_0")

CONVERT_FLAGS = flags_for(
    "convert",
    "Conversion",
    (
        "model",
        TextParser(),
        None,
        "what to read: smollm2-135m (demo), a Hugging Face directory, a .gguf, an Orbax directory or a hub id",
    ),
    ("output", TextParser(), None, "what to write: a directory, or a file that ends in .gguf"),
    ("format", ChoiceParser(FORMATS), None, "of the output; default: gguf for a name that ends so, else safetensors"),
    (
        "dtype",
        ChoiceParser(CONVERT_DTYPES),
        "auto",
        "of the weights; auto: each as it is stored, float32 where it is quantised. q8_0 is GGUF's",
    ),
    ("max_shard_gb", FloatParser(low=1e-6), 5.0, "GB of tensors in one safetensors file"),
    ("tokenizer", ChoiceParser(("auto", "none")), "auto", "none: leave the tokenizer out"),
    ("overwrite", BooleanParser(), False, "replace a model that is there already"),
    ("log_level", ChoiceParser(LOG_LEVELS), "warning", "least level that is logged"),
)

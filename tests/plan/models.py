"""A model small enough to be reckoned by hand."""

import json

from jaxserve.config import EngineConfig
from jaxserve.plan.model_file import find_config, read_model
from jaxserve.plan.plan import make_plan
from jaxserve.plan.targets import find_slice

SMALL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SPLIT = 2 * 1024 * 256 + 3 * (2 * 256 * 8 * 128 + 3 * 256 * 512)
"""Weights of SMALL that divide among 4 and among 8: embedding and output layer, queries, outputs, MLP."""
OF_KV_HEADS = 3 * 2 * 256 * 4 * 128
"""Keys' and values' matrices."""
NORMS = 7 * 256
"""On every device."""


def write_config(folder, **changes):
    """The file of SMALL with changes."""
    path = folder / "config.json"
    path.write_text(json.dumps(SMALL | changes))
    return path


def plan_for(model, target, *, compiles=False, context=1024, **settings):
    """A plan of a config by name or path."""
    path, where = find_config(str(model)), find_slice(target)
    config = EngineConfig(tensor_parallel_size=settings.pop("tensor_parallel_size", where.num_chips), **settings)
    return make_plan(path.stem, path, read_model(path), where, config, compiles=compiles, context=context)

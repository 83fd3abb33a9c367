"""Random JSON schemas whose documents are short: the same for the same seed."""

from __future__ import annotations

import random
from typing import Any

_SCALARS = ("integer", "enum", "boolean", "null", "string", "pattern", "const", "multiple", "date")


def random_schema(seed: int) -> dict[str, Any]:
    """An object or array schema; a document takes at most about 200 bytes."""
    rng = random.Random(seed)
    schema = _object(rng, 2) if rng.random() < 0.8 else _array(rng, 2)
    if rng.random() < 0.2:
        return {"$defs": {"root": schema}, "$ref": "#/$defs/root"}
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["a", "b2", "name", "x y", "é", 'q"'], rng.randint(1, 3 if depth == 2 else 2))
    properties = {name: _value(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _value(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 1)}


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth > 0 and rng.random() < 0.5:
        return _object(rng, depth) if rng.random() < 0.5 else _array(rng, depth)
    if rng.random() < 0.15:
        return {"anyOf": [_scalar(rng), _scalar(rng)]}
    return _scalar(rng)


def _scalar(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(_SCALARS)
    low = rng.randint(-50, 50)
    return {
        "integer": {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 999)},
        "enum": {"enum": rng.sample(["red", "green", 3, None, True, "a b"], rng.randint(1, 4))},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "string": {"type": "string", "minLength": 1, "maxLength": rng.randint(1, 5)},
        "pattern": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{1,3}$"},
        "const": {"const": rng.choice(["fixed", 7, False])},
        "multiple": {"type": "integer", "minimum": 0, "maximum": 60, "multipleOf": rng.randint(2, 9)},
        "date": {"type": "string", "format": "date"},
    }[kind]

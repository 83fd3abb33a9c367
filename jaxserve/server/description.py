"""What /openapi.json says of the routes.

Bodies are parsed and answers written by hand, so FastAPI derives neither. Types of fields come from the request
models; their ranges are checked elsewhere (`SamplingParams`, `field_checks`) and told here, from the same constants.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from jaxserve.core.request import Priority
from jaxserve.core.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_NUM_CHOICES,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SEED_MAX,
    SEED_MIN,
)
from jaxserve.server.field_checks import MAX_ITEMS, MAX_NAME_CHARS, REQUEST_ID
from jaxserve.server.messages import MAX_MESSAGES, ROLES
from jaxserve.server.schema import MAX_PROMPTS

Schema = dict[str, Any]

_COUNT = {"minimum": 0, "maximum": 2**63 - 1}
_SHARE = {"minimum": 0, "maximum": 1}
_PENALTY = {"minimum": -2, "maximum": 2}
_ALTERNATIVES = {"minimum": 0, "maximum": MAX_LOGPROBS}
_NAME = {"maxLength": MAX_NAME_CHARS}
_ID = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_IDS = {"type": "array", "items": _ID, "minItems": 1}
_TEXT = {"type": "string"}
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"enum": list(ROLES)}, "content": _CONTENT},
}
_TOOL = {"type": "object", "required": ["type"], "properties": {"type": {"const": "function"}}}
_EVENT = {"type": "object", "required": ["data"], "properties": {"event": _TEXT, "data": _TEXT}}
_PROMPTS = {
    "anyOf": [
        _TEXT,
        _IDS,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}
_RULES: dict[tuple[str, str | None], Schema] = {
    # (field, type; None where the model leaves it open): what else is true of its values
    ("n", "integer"): {"minimum": 1, "maximum": MAX_NUM_CHOICES},
    ("best_of", "integer"): {"minimum": 1, "maximum": MAX_NUM_CHOICES},
    ("max_tokens", "integer"): _COUNT,
    ("max_completion_tokens", "integer"): _COUNT,
    ("max_output_tokens", "integer"): _COUNT | {"minimum": 1},
    ("min_tokens", "integer"): _COUNT,
    ("temperature", "number"): {"minimum": 0, "maximum": 100},
    ("top_k", "integer"): _COUNT | {"minimum": -1},
    ("top_p", "number"): _SHARE,
    ("min_p", "number"): _SHARE,
    ("presence_penalty", "number"): _PENALTY,
    ("frequency_penalty", "number"): _PENALTY,
    ("repetition_penalty", "number"): {"minimum": 0.01, "maximum": 100},
    ("seed", "integer"): {"minimum": SEED_MIN, "maximum": SEED_MAX},
    ("logprobs", "integer"): _ALTERNATIVES,
    ("top_logprobs", "integer"): _ALTERNATIVES,
    ("prompt_logprobs", "integer"): _ALTERNATIVES,
    ("logit_bias", "object"): {
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_ITEMS["logit_bias"][0],
    },
    ("allowed_token_ids", "array"): _IDS | {"maxItems": MAX_ALLOWED_TOKEN_IDS},
    ("bad_words", "array"): {"maxItems": MAX_BAD_WORDS},
    ("stop", "string"): {"minLength": 1, "maxLength": MAX_STOP_STRING_CHARS},
    ("stop", "array"): {
        "items": _TEXT | {"minLength": 1, "maxLength": MAX_STOP_STRING_CHARS},
        "maxItems": MAX_STOP_STRINGS,
    },
    ("stop_token_ids", "array"): {"items": _ID, "maxItems": MAX_STOP_TOKEN_IDS},
    ("priority", "integer"): {"minimum": Priority.MIN, "maximum": Priority.MAX},
    ("priority", "string"): {"enum": list(Priority.NAMES)},
    ("deadline_s", "number"): {"exclusiveMinimum": 0},
    ("truncate_prompt_tokens", "integer"): {"minimum": -1},
    ("request_id", "string"): {"pattern": f"^{REQUEST_ID.pattern}$"},
    ("service_class", "string"): _NAME,
    ("tenant", "string"): _NAME,
    ("cache_salt", "string"): _NAME,
    ("tokens", "array"): {"items": _ID, "maxItems": MAX_ITEMS["tokens"][0]},
    ("prompt", None): _PROMPTS,
    ("messages", "array"): {"items": _MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES},
    ("tools", "array"): {"items": _TOOL},
    ("tool_choice", None): {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]},
    ("input", None): {
        "anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}, "minItems": 1, "maxItems": MAX_MESSAGES}]
    },
}


class ErrorBody(BaseModel):
    """`type` and `code` are words for programs; `param` is the field at fault, if one is."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every refusal and failure."""

    error: ErrorBody


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "A mistake of the caller's, or more than the server can take"},
    "5XX": {"model": ErrorAnswer, "description": "Not ready, not able, or a fault of the server's"},
}
"""Of every route. docs/serving.md has the status codes."""


def takes(model: type[BaseModel], example: Schema, required: Sequence[str] = ()) -> dict[str, Any]:
    """Route arguments that describe a JSON body which is parsed by hand.

    Args:
      model: of the body; null stands for an absent field.
      example: a body that is answered with 200 by any model.
      required: fields that the model itself lets be absent.
    """
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    # Definitions are written in place: the document has no component of that name.
    schema["properties"] = {name: _field(name, value, definitions) for name, value in schema["properties"].items()}
    schema["required"] = [*schema.get("required", ()), *required]
    content = {"application/json": {"schema": schema, "examples": {"short": {"value": example}}}}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}}


def answers(*members: str, streams: bool = False, other: Sequence[int] = ()) -> dict[str, Any]:
    """Route arguments that describe the answer: a JSON object.

    Args:
      members: it always has.
      streams: server-sent events instead, when the request asks for them; their schema is one event's.
      other: status codes of answers that are no error objects.
    """
    content: Schema = {"application/json": {"schema": {"type": "object", "required": list(members)}}}
    if streams:
        content["text/event-stream"] = {"schema": _EVENT}
    plain = {"description": "The same, of a server that is not well", "content": {"application/json": {}}}
    return {"responses": {200: {"description": "Success", "content": content}} | {status: plain for status in other}}


def parameters(*given: tuple[str, str, Schema]) -> dict[str, Any]:
    """Route arguments that describe parameters, each as name, place (path or query) and schema."""
    shown = [
        {"name": name, "in": place, "required": place == "path", "schema": schema} for name, place, schema in given
    ]
    return {"openapi_extra": {"parameters": shown}}


def describe_keys(app: FastAPI, open_paths: Container[str]) -> None:
    """Says of every route but `open_paths` that it needs an API key; called once all routes are there."""
    document = app.openapi()  # FastAPI keeps this object and serves it
    document.setdefault("components", {})["securitySchemes"] = {
        "api_key": {"type": "http", "scheme": "bearer", "description": "One of the server's API keys"}
    }
    for path, operations in document["paths"].items():
        if path not in open_paths:
            for operation in operations.values():
                operation["security"] = [{"api_key": []}]


def _field(name: str, schema: Schema, definitions: Schema) -> Schema:
    alternatives = [
        definitions[kind["$ref"].rpartition("/")[2]] if "$ref" in kind else kind
        for kind in schema.get("anyOf", [schema])
    ]
    refined = [kind | _RULES.get((name, kind.get("type")), {}) for kind in alternatives]
    return schema | {"anyOf": refined} if "anyOf" in schema else refined[0]

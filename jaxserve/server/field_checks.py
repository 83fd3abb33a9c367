"""What a field of a JSON request may hold: the rules that are not pydantic's, and how a breach reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from jaxserve.core.request import Priority
from jaxserve.core.sampling_params import MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORDS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from jaxserve.core.structured_outputs import MAX_CHOICES
from jaxserve.server.errors import ApiError
from jaxserve.server.service import MAX_DETOKENIZE_IDS

MAX_ITEMS = {
    "stop": (MAX_STOP_STRINGS, "strings"),
    "stop_token_ids": (MAX_STOP_TOKEN_IDS, "ids"),
    "logit_bias": (1024, "entries"),
    "allowed_token_ids": (MAX_ALLOWED_TOKEN_IDS, "ids"),
    "bad_words": (MAX_BAD_WORDS, "words"),
    "guided_choice": (MAX_CHOICES, "texts"),
    "tokens": (MAX_DETOKENIZE_IDS, "ids"),
}
"""Most items of a field. Checked before pydantic sees it, which collects an error for every item."""
MAX_NAME_CHARS = 256
"""Longest service class, tenant or cache salt."""
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    # field: values that ask for nothing
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "structural_tag": (),
    "guided_decoding_backend": ("auto", "guidance"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "store": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "chat_template": (),
    "documents": ([],),
    "prompt_embeds": (),
}
"""Fields of OpenAI's and vLLM's APIs that this version does not have."""
REASONS = {
    "suffix": "the model goes on at a text's end and cannot be told what follows",
    "functions": "it is the older form of tools; use tools",
    "function_call": "it is the older form of tool_choice; use tools and tool_choice",
    "store": "nothing is kept once a request has been answered",
    "use_beam_search": "outputs are sampled, each on its own",
}
"""Why, where a client may wonder."""


def refuse_unsupported(body: Mapping[str, Any], elsewhere: Mapping[str, tuple[Any, ...]], path: str) -> None:
    """Raises ApiError 400 for a known field that would be ignored.

    Args:
      elsewhere: fields of another route, with the values that ask for nothing.
      path: that route.
    """
    for name, harmless in NOT_SUPPORTED.items():
        if asks(body.get(name), harmless):
            reason = f": {REASONS[name]}" if name in REASONS else ""
            raise field_error(name, f"{name} is not supported{reason}; leave it out")
    for name, harmless in elsewhere.items():
        if asks(body.get(name), harmless):
            raise field_error(name, f"{name} is a field of {path}; leave it out here")


def asks(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Whether a field's value asks for something."""
    return value is not None and not any(type(value) is type(other) and value == other for other in harmless)


def parse_model[T: BaseModel](cls: type[T], body: dict[str, Any]) -> T:
    """A pydantic model from a parsed body; ApiError 400 naming the field."""
    for name, (limit, what) in MAX_ITEMS.items():
        value = body.get(name)
        if name in cls.model_fields and isinstance(value, list | dict) and len(value) > limit:
            raise field_error(name, f"{name} has {len(value)} {what}; the limit is {limit}")
    try:
        return cls.model_validate(body)
    except ValidationError as exc:
        raise _validation_error(exc) from None


def check_request_id(request_id: str) -> None:
    """Raises ApiError 400 unless it can be an id: it goes into headers, logs and traces."""
    if not REQUEST_ID.fullmatch(request_id):
        raise field_error("request_id", "request_id must have 1 to 128 printable ASCII characters, no blanks")


def check_truncation(kept: int) -> None:
    """Raises ApiError 400 unless `truncate_prompt_tokens` can be this."""
    if kept < 1 and kept != -1:
        message = f"truncate_prompt_tokens is {kept}; it must be at least 1, or -1 to keep what fits"
        raise field_error("truncate_prompt_tokens", message)


def kept_tokens(kept: int, room: int, max_model_len: int) -> int:
    """How many of a prompt's last tokens `truncate_prompt_tokens` keeps.

    Args:
      kept: checked by `check_truncation`.
      room: output tokens to leave room for when `kept` is -1.

    Raises:
      ApiError: 400; more than a context holds.
    """
    if kept > max_model_len:
        message = f"truncate_prompt_tokens is {kept}; the limit is {max_model_len} (max_model_len)"
        raise field_error("truncate_prompt_tokens", message)
    return max(1, max_model_len - room) if kept == -1 else kept


def check_name(field: str, value: str) -> None:
    """Raises ApiError 400 for a name that is too long; an empty one is none."""
    if len(value) > MAX_NAME_CHARS:
        raise field_error(field, f"{field} has {len(value)} characters; the limit is {MAX_NAME_CHARS}")


def parse_priority(value: int | str) -> int:
    """A priority from a number (lower first) or one of the names high, normal, low."""
    if isinstance(value, str):
        if value not in Priority.NAMES:
            raise field_error("priority", f"priority is {value[:50]!r}; it must be high, normal, low or an integer")
        return Priority.NAMES[value]
    if not Priority.MIN <= value <= Priority.MAX:
        raise field_error("priority", f"priority is {value}; it must be in [{Priority.MIN}, {Priority.MAX}]")
    return value


def check_ids(name: str, ids: Sequence[Any], limit: int) -> None:
    if len(ids) > limit:
        message = f"{name} has {len(ids)} tokens; the limit is {limit} (max_model_len), output included"
        raise ApiError("invalid", message, param="prompt", code="context_length_exceeded")
    if set(map(type, ids)) - {int}:
        other = next(token_id for token_id in ids if type(token_id) is not int)
        raise field_error("prompt", f"{name} must hold integer token ids; got {_short(other)}")


def bias_token_id(key: str) -> int:
    if re.fullmatch(r"-?[0-9]{1,18}", key):
        return int(key)
    raise field_error("logit_bias", f"logit_bias has the key {_short(key)}; keys must be token ids")


def field_error(field: str, message: str) -> ApiError:
    return ApiError("invalid", message, param=field)


def _validation_error(exc: ValidationError) -> ApiError:
    """The first fault, in our form; pydantic's own text has links and internals."""
    first = exc.errors(include_url=False, include_context=False)[0]
    # Of a union, pydantic names the member that it tried: no part of the path a client wrote.
    path = [str(part)[:60] for part in first["loc"] if part not in ("str", "int", "list[str]")]
    name = ".".join(path) or "request"
    if first["type"] == "missing":
        return field_error(name, f"{name} is required")
    rule = first["msg"].removeprefix("Input ")
    return field_error(path[0] if path else name, f"{name} {rule}; got {_short(first['input'])}")


def _short(value: object) -> str:
    """A value for a message; cut before it is written out, as it may be the whole body."""
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."

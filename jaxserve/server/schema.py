"""The JSON requests of the HTTP API, and how they become `SamplingParams`.

Rules, the same for every field:
- null means the default, as if the field were absent;
- a known field is never ignored in silence: what this version cannot do is refused by name
  (`NOT_SUPPORTED`), unless its value asks for nothing;
- an unknown field is ignored, as OpenAI's clients expect;
- numbers are numbers: `true` and `"0.7"` are refused.

Ranges are checked once, in `SamplingParams`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError

from jaxserve.core import SamplingParams, Terms
from jaxserve.core.request import Priority
from jaxserve.core.sampling_params import MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from jaxserve.server.errors import ApiError
from jaxserve.server.service import MAX_DETOKENIZE_IDS

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` of /v1/completions, clipped to the context; a chat's is the context's end."""
MAX_PROMPTS = 1024
MAX_ITEMS = {
    "stop": (MAX_STOP_STRINGS, "strings"),
    "stop_token_ids": (MAX_STOP_TOKEN_IDS, "ids"),
    "logit_bias": (1024, "entries"),
    "tokens": (MAX_DETOKENIZE_IDS, "ids"),
}
"""Most items of a field. Checked before pydantic sees it, which collects an error for every item."""
NO_SPECIAL_TOKENS_IN_CHAT = (
    "add_special_tokens is not supported for chat, whose template writes the special tokens; leave it out"
)
MAX_NAME_CHARS = 256
"""Longest service class, tenant or cache salt."""
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    # field: values that ask for nothing
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
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
    "truncate_prompt_tokens": (),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "prompt_embeds": (),
}
"""Fields of OpenAI's and vLLM's APIs that this version does not have."""


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class GenerationRequest(BaseModel):
    """Fields that completions and chat share.

    Service class and tenant may also be named in the headers `X-Service-Class` and `X-Tenant`; the body wins.
    `priority` orders the queue under `--policy=priority` and preempts under `--priority_preemption`.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    request_id: str | None = None
    priority: int | str | None = None
    deadline_s: float | None = None
    service_class: str | None = None
    tenant: str | None = None
    cache_salt: str | None = None

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """Checks types and unsupported fields.

        Raises:
          ApiError: 400 naming the field, the rule and the value.
        """
        for name, harmless in NOT_SUPPORTED.items():
            value = body.get(name)
            if value is not None and not any(type(value) is type(h) and value == h for h in harmless):
                raise _field_error(name, f"{name} is not supported; leave it out")
        request = parse_model(cls, body)
        if request.stream_options is not None and not request.stream:
            raise _field_error("stream_options", "stream_options needs stream to be true; leave it out")
        if request.stream and request.prompt_logprobs is not None:
            raise _field_error("prompt_logprobs", "prompt_logprobs is not available with stream; set stream to false")
        request.check()
        return request

    def check(self) -> None:
        """Rules between fields; subclasses add theirs."""
        if self.request_id is not None:
            check_request_id(self.request_id)
        if self.deadline_s is not None and not (self.deadline_s > 0 and math.isfinite(self.deadline_s)):
            raise _field_error("deadline_s", f"deadline_s is {self.deadline_s:g}; it must be above 0 seconds")
        for name in ("service_class", "tenant", "cache_salt"):
            check_name(name, getattr(self, name) or "")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def num_choices(self) -> int:
        """Completions per prompt."""
        return 1 if self.n is None else self.n

    def terms(self, headers: Mapping[str, str]) -> Terms:
        """What is asked of the scheduler, by the body or else by headers."""
        service_class = self.service_class or headers.get("x-service-class", "")
        tenant = self.tenant or headers.get("x-tenant", "")
        check_name("service_class", service_class)
        check_name("tenant", tenant)
        return Terms(
            priority=None if self.priority is None else parse_priority(self.priority),
            deadline_s=self.deadline_s,
            service_class=service_class,
            tenant=tenant,
            cache_salt=self.cache_salt or "",
        )

    def sampling_params(self, **overrides: Any) -> SamplingParams:
        """The sampling settings; null fields take `SamplingParams`' defaults.

        Raises:
          ValueError: naming field, rule and value.
        """
        values = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.logit_bias:
            values["logit_bias"] = {_bias_token_id(key): bias for key, bias in self.logit_bias.items()}
        return SamplingParams(**(values | overrides))


_SAMPLING_FIELDS = (
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """See the base class; `best_of` equal to `n` asks for nothing."""
        best_of = body.get("best_of")
        if type(best_of) is int and best_of == body.get("n"):
            body = body | {"best_of": None}
        return super().parse(body)

    def prompts(self, max_model_len: int) -> list[str] | list[list[int]]:
        """The prompts as texts or as token ids (their range is the engine's to check).

        Args:
          max_model_len: most token ids of a prompt.

        Raises:
          ApiError: 400; nothing there, neither form, or too many.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            got = "null" if prompt is None else "an empty list" if prompt == [] else type(prompt).__name__
            raise _field_error("prompt", f"prompt must be a string, token ids, or a list of either; got {got}")
        if all(type(item) is str for item in prompt) or all(type(item) is list for item in prompt):
            if len(prompt) > MAX_PROMPTS:
                raise _field_error("prompt", f"prompt has {len(prompt)} prompts; the limit is {MAX_PROMPTS}")
            for index, ids in enumerate(prompt):
                if isinstance(ids, list):
                    _check_ids(f"prompt[{index}]", ids, max_model_len)
            return prompt
        _check_ids("prompt", prompt, max_model_len)
        return [prompt]


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Rules between a chat's fields."""
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise _field_error("top_logprobs", "top_logprobs needs logprobs to be true")
        if self.add_special_tokens is not None:
            raise _field_error("add_special_tokens", NO_SPECIAL_TOKENS_IN_CHAT)
        if self.echo:
            raise _field_error("echo", "echo is not supported for chat; leave it out")
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise _field_error("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
            self.max_tokens = self.max_completion_tokens


class TokenizeRequest(BaseModel):
    """POST /tokenize: a text, or messages through the chat template."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    tokens: Annotated[list[int], FailFast()]


def parse_model[T: BaseModel](cls: type[T], body: dict[str, Any]) -> T:
    """A pydantic model from a parsed body; ApiError 400 naming the field."""
    for name, (limit, what) in MAX_ITEMS.items():
        value = body.get(name)
        if name in cls.model_fields and isinstance(value, list | dict) and len(value) > limit:
            raise _field_error(name, f"{name} has {len(value)} {what}; the limit is {limit}")
    try:
        return cls.model_validate(body)
    except ValidationError as exc:
        raise _validation_error(exc) from None


def check_request_id(request_id: str) -> None:
    """Raises ApiError 400 unless it can be an id: it goes into headers, logs and traces."""
    if not REQUEST_ID.fullmatch(request_id):
        raise _field_error("request_id", "request_id must have 1 to 128 printable ASCII characters, no blanks")


def check_name(field: str, value: str) -> None:
    """Raises ApiError 400 for a name that is too long; an empty one is none."""
    if len(value) > MAX_NAME_CHARS:
        raise _field_error(field, f"{field} has {len(value)} characters; the limit is {MAX_NAME_CHARS}")


def parse_priority(value: int | str) -> int:
    """A priority from a number (lower first) or one of the names high, normal, low."""
    if isinstance(value, str):
        if value not in Priority.NAMES:
            raise _field_error("priority", f"priority is {value[:50]!r}; it must be high, normal, low or an integer")
        return Priority.NAMES[value]
    if not Priority.MIN <= value <= Priority.MAX:
        raise _field_error("priority", f"priority is {value}; it must be in [{Priority.MIN}, {Priority.MAX}]")
    return value


def _check_ids(name: str, ids: Sequence[Any], limit: int) -> None:
    if len(ids) > limit:
        message = f"{name} has {len(ids)} tokens; the limit is {limit} (max_model_len), output included"
        raise ApiError("invalid", message, param="prompt", code="context_length_exceeded")
    if set(map(type, ids)) - {int}:
        other = next(token_id for token_id in ids if type(token_id) is not int)
        raise _field_error("prompt", f"{name} must hold integer token ids; got {_short(other)}")


def _bias_token_id(key: str) -> int:
    if re.fullmatch(r"-?[0-9]{1,18}", key):
        return int(key)
    raise _field_error("logit_bias", f"logit_bias has the key {_short(key)}; keys must be token ids")


def _field_error(field: str, message: str) -> ApiError:
    return ApiError("invalid", message, param=field)


def _validation_error(exc: ValidationError) -> ApiError:
    """The first fault, in our form; pydantic's own text has links and internals."""
    first = exc.errors(include_url=False, include_context=False)[0]
    # Of a union, pydantic names the member that it tried: no part of the path a client wrote.
    path = [str(part)[:60] for part in first["loc"] if part not in ("str", "int", "list[str]")]
    name = ".".join(path) or "request"
    if first["type"] == "missing":
        return _field_error(name, f"{name} is required")
    rule = first["msg"].removeprefix("Input ")
    return _field_error(path[0] if path else name, f"{name} {rule}; got {_short(first['input'])}")


def _short(value: object) -> str:
    """A value for a message; cut before it is written out, as it may be the whole body."""
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."

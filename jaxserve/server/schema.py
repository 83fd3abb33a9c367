"""The JSON requests of the HTTP API, and how they become `SamplingParams`.

Rules, the same for every field:
- null means the default, as if the field were absent;
- a known field is never ignored in silence: what this version cannot do is refused by name
  (`field_checks.NOT_SUPPORTED`), unless its value asks for nothing;
- an unknown field is ignored, as OpenAI's clients expect;
- numbers are numbers: `true` and `"0.7"` are refused.

Ranges are checked once, in `SamplingParams`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, FailFast

from jaxserve.core import MAX_TRACEPARENT, SamplingParams, Terms
from jaxserve.server.auth import agreed_tenant
from jaxserve.server.field_checks import (
    bias_token_id,
    check_ids,
    check_name,
    check_request_id,
    check_truncation,
    field_error,
    kept_tokens,
    parse_model,
    parse_priority,
    refuse_unsupported,
)
from jaxserve.server.service import MAX_DETOKENIZE_IDS
from jaxserve.server.structured_fields import StructuredFields

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` of /v1/completions, clipped to the context; a chat's is the context's end."""
MAX_PROMPTS = 1024
NO_SPECIAL_TOKENS_IN_CHAT = (
    "add_special_tokens is not supported for chat, whose template writes the special tokens; leave it out"
)


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(StructuredFields):
    """Fields that completions and chat share.

    Service class and tenant may also be named in the headers `X-Service-Class` and `X-Tenant`; the body wins.
    `priority` orders the queue under `--policy=priority` and preempts under `--priority_preemption`.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    ELSEWHERE: ClassVar[tuple[str, dict[str, tuple[Any, ...]]]]
    """Another route, and its fields that this one would ignore, with the values that ask for nothing."""
    OPERATION: ClassVar[str] = "text_completion"
    """As OpenTelemetry's conventions name it."""
    ROOM: ClassVar[int] = 1
    """Output tokens to keep free for a prompt that is cut to what fits, when `max_tokens` does not say."""

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
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
    allowed_token_ids: list[Any] | None = None  # ids, which `SamplingParams` checks in one go
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
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
        path, fields = cls.ELSEWHERE
        refuse_unsupported(body, fields, path)
        request = parse_model(cls, body)
        request.check()
        return request

    def check(self) -> None:
        """Rules between fields; subclasses add theirs."""
        self._check_stream()
        if self.best_of is not None and self.best_of != self.num_choices:
            asked = f"best_of is {self.best_of} and n is {self.num_choices}"
            raise field_error("best_of", f"{asked}; they must be equal: every choice is returned")
        if self.truncate_prompt_tokens is not None:
            check_truncation(self.truncate_prompt_tokens)
        if self.request_id is not None:
            check_request_id(self.request_id)
        if self.deadline_s is not None and not (self.deadline_s > 0 and math.isfinite(self.deadline_s)):
            raise field_error("deadline_s", f"deadline_s is {self.deadline_s:g}; it must be above 0 seconds")
        for name in ("service_class", "tenant", "cache_salt"):
            check_name(name, getattr(self, name) or "")

    def _check_stream(self) -> None:
        options = self.stream_options
        if options is not None and not self.stream:
            raise field_error("stream_options", "stream_options needs stream to be true; leave it out")
        if options is not None and options.continuous_usage_stats and not options.include_usage:
            message = "stream_options.continuous_usage_stats needs stream_options.include_usage to be true"
            raise field_error("stream_options", message)
        if self.stream and self.prompt_logprobs is not None:
            raise field_error("prompt_logprobs", "prompt_logprobs is not available with stream; set stream to false")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream tells the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def kept_tokens(self, max_model_len: int) -> int | None:
        """How many of a prompt's last tokens are kept; None: all.

        Raises:
          ApiError: 400; more than a context holds.
        """
        kept = self.truncate_prompt_tokens
        if kept is None:
            return None
        room = self.ROOM if self.max_tokens is None else self.max_tokens
        return kept_tokens(kept, max(room, self.min_tokens or 0), max_model_len)

    @property
    def num_choices(self) -> int:
        """Completions per prompt."""
        return 1 if self.n is None else self.n

    def terms(self, headers: Mapping[str, str], key_tenant: str = "") -> Terms:
        """What is asked of the scheduler, by the body or else by headers; the tenant is the key's where it has one.

        Raises:
          ApiError: 403; another tenant than the key's.
        """
        service_class = self.service_class or headers.get("x-service-class", "")
        tenant = self.tenant or headers.get("x-tenant", "")
        check_name("service_class", service_class)
        check_name("tenant", tenant)
        return Terms(
            priority=None if self.priority is None else parse_priority(self.priority),
            deadline_s=self.deadline_s,
            service_class=service_class,
            tenant=agreed_tenant(tenant, key_tenant),
            cache_salt=self.cache_salt or "",
            operation=self.OPERATION,
            traceparent=headers.get("traceparent", "")[:MAX_TRACEPARENT],
        )

    def sampling_params(self, **overrides: Any) -> SamplingParams:
        """The sampling settings; null fields take `SamplingParams`' defaults.

        Raises:
          ValueError: naming field, rule and value.
        """
        values = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.logit_bias:
            values["logit_bias"] = {bias_token_id(key): bias for key, bias in self.logit_bias.items()}
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
    "allowed_token_ids",
    "bad_words",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    ELSEWHERE = (
        "/v1/chat/completions",
        {
            "messages": (),
            "add_generation_prompt": (True,),
            "continue_final_message": (False,),
            "chat_template_kwargs": ({},),
            "max_completion_tokens": (),
            "top_logprobs": (),
            "tools": ([],),
            "tool_choice": ("none", "auto"),
            "parallel_tool_calls": (True, False),
        },
    )
    ROOM = DEFAULT_COMPLETION_TOKENS

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None

    def prompts(self, max_model_len: int) -> list[str] | list[list[int]]:
        """The prompts as texts or as token ids (their range is the engine's to check).

        Args:
          max_model_len: most token ids of a prompt that is not to be cut.

        Raises:
          ApiError: 400; nothing there, neither form, or too many.
        """
        prompt = self.prompt
        limit = max_model_len if self.truncate_prompt_tokens is None else MAX_DETOKENIZE_IDS
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            got = "null" if prompt is None else "an empty list" if prompt == [] else type(prompt).__name__
            raise field_error("prompt", f"prompt must be a string, token ids, or a list of either; got {got}")
        if all(type(item) is str for item in prompt) or all(type(item) is list for item in prompt):
            if len(prompt) > MAX_PROMPTS:
                raise field_error("prompt", f"prompt has {len(prompt)} prompts; the limit is {MAX_PROMPTS}")
            for index, ids in enumerate(prompt):
                if isinstance(ids, list):
                    check_ids(f"prompt[{index}]", ids, limit)
            return prompt
        check_ids("prompt", prompt, limit)
        return [prompt]


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    ELSEWHERE = ("/v1/completions", {"prompt": (), "echo": (False,)})
    OPERATION = "chat"

    messages: list[Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        """Rules between a chat's fields."""
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise field_error("top_logprobs", "top_logprobs needs logprobs to be true")
        if self.add_special_tokens is not None:
            raise field_error("add_special_tokens", NO_SPECIAL_TOKENS_IN_CHAT)
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise field_error("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
            self.max_tokens = self.max_completion_tokens


class TokenizeRequest(BaseModel):
    """POST /tokenize: a text, or messages (and tools) through the chat template."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    tokens: Annotated[list[int], FailFast()]

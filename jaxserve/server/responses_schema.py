"""The request of /v1/responses: what a server that keeps nothing can honour of it."""

from __future__ import annotations

from typing import Any, Self

from jaxserve.core import StructuredOutputs
from jaxserve.server.field_checks import asks, field_error
from jaxserve.server.schema import GenerationRequest
from jaxserve.server.structured_fields import Constraint

MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_VALUE_CHARS = 16, 64, 512
"""As OpenAI has them."""
_NOT_KEPT = "this server keeps no responses; send the whole conversation as input"
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    # field: values that ask for nothing, and why others are refused
    "previous_response_id": ((), _NOT_KEPT),
    "conversation": ((), _NOT_KEPT),
    "background": ((False,), _NOT_KEPT),
    "prompt": ((), "this server keeps no prompts; send instructions and input"),
    "truncation": (("disabled",), "use truncate_prompt_tokens, which says how much is kept"),
    "top_logprobs": ((0,), "use /v1/chat/completions"),
    "prompt_logprobs": ((), "use /v1/chat/completions"),
    "return_token_ids": ((False,), "use /v1/chat/completions"),
    "include": (([], ["reasoning.encrypted_content"]), "there is nothing to include"),
}
_VERBOSITY = "medium"


class ResponsesRequest(GenerationRequest):
    """POST /v1/responses."""

    ELSEWHERE = (
        "/v1/chat/completions",
        {
            "messages": (),
            "n": (1,),
            "max_tokens": (),
            "max_completion_tokens": (),
            "response_format": (),
            "logprobs": (False,),
            "add_generation_prompt": (True,),
            "continue_final_message": (False,),
        },
    )

    input: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """See `GenerationRequest.parse`."""
        for name, (harmless, reason) in _REFUSED.items():
            if asks(body.get(name), harmless):
                raise field_error(name, f"{name} is not supported: {reason}")
        return super().parse(body)

    def check(self) -> None:
        """Rules between the fields."""
        super().check()
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            message = f"max_output_tokens is {self.max_output_tokens}; it must be at least 1"
            raise field_error("max_output_tokens", message)
        self.max_tokens = self.max_output_tokens
        for name, value in (self.reasoning or {}).items():
            if value is not None and (name, value) != ("effort", "none"):
                raise field_error("reasoning", f"reasoning.{name} is not supported; leave it out")
        if (self.text or {}).get("verbosity") not in (None, _VERBOSITY):
            raise field_error("text", "text.verbosity is not supported; leave it out")
        self._check_metadata()

    def _check_metadata(self) -> None:
        metadata = self.metadata or {}
        if len(metadata) > MAX_METADATA:
            raise field_error("metadata", f"metadata has {len(metadata)} entries; the limit is {MAX_METADATA}")
        for key, value in metadata.items():
            if len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS:
                limits = f"{MAX_METADATA_KEY_CHARS} characters of a key and {MAX_METADATA_VALUE_CHARS} of a value"
                raise field_error(
                    "metadata", f"metadata[{key[:MAX_METADATA_KEY_CHARS]!r}] is too long; limits are {limits}"
                )

    @property
    def format(self) -> dict[str, Any]:
        """`text.format`."""
        given = (self.text or {}).get("format")
        return {"type": "text"} if given is None else given

    @property
    def constrained(self) -> bool:
        """See `StructuredFields`."""
        return self.format != {"type": "text"} or super().constrained

    def constraint(self) -> Constraint | None:
        """See `StructuredFields`; `text.format` is one of the fields."""
        format_ = self.format
        other = super().constraint()
        kind = format_.get("type") if isinstance(format_, dict) else None
        if kind == "text":
            return other
        if other is not None:
            raise field_error("text", f"text.format and {other.field} each say what the output must be; give one")
        if kind == "json_object":
            return Constraint("text", "text.format", StructuredOutputs(json_object=True))
        if kind != "json_schema":
            raise field_error("text", "text.format.type must be one of text, json_object, json_schema")
        schema = format_.get("schema")
        if not isinstance(schema, dict | bool):
            raise field_error("text", "text.format.schema must be a JSON schema")
        return Constraint("text", "text.format.schema", StructuredOutputs(json=schema))

"""Between the gRPC messages and the project's own values."""

from __future__ import annotations

from typing import Any

from jaxserve.core import FinishReason, SamplingParams, StructuredOutputs
from jaxserve.server.engine_api import Delta, EngineApi, TokenizerApi, TokenLogprobs
from jaxserve.server.errors import ApiError
from jaxserve.server.messages import normalize_messages
from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.structured_fields import Constraint

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
_NO_SCALARS = ("logit_bias", "stop", "stop_token_ids", "structured_outputs")


def sampling_params(message: pb.SamplingParams, wanted: StructuredOutputs | None = None) -> SamplingParams:
    """Set fields over the defaults; `max_tokens` unset means up to the context's end.

    Args:
      wanted: what `structured_outputs` asks for.

    Raises:
      ValueError: naming field, rule and value.
    """
    values: dict[str, Any] = {"max_tokens": None}
    for field, value in message.ListFields():
        if field.name not in _NO_SCALARS:
            values[field.name] = value
    values["logit_bias"] = dict(message.logit_bias)
    values["stop"] = tuple(message.stop)
    values["stop_token_ids"] = tuple(message.stop_token_ids)
    return SamplingParams(**values, structured_outputs=wanted)


def constraint(message: pb.StructuredOutputs) -> Constraint:
    """What an output must be.

    Raises:
      ApiError: 400; none or a malformed one.
    """
    values: dict[str, Any] = {}
    kind = message.WhichOneof("constraint")
    if kind is not None:
        values[kind] = list(message.choice.texts) if kind == "choice" else getattr(message, kind)
    for name in ("disable_any_whitespace", "whitespace_pattern"):
        if message.HasField(name):
            values[name] = getattr(message, name)
    try:
        return Constraint("structured_outputs", "", StructuredOutputs(**values))
    except ValueError as error:
        raise ApiError("invalid", str(error), param="structured_outputs") from None


def chat_messages(chat: pb.ChatMessages) -> list[dict[str, Any]]:
    """Messages as the chat template reads them."""
    plain: list[Any] = []
    for message in chat.messages:
        entry = {"role": message.role, "content": message.content}
        if message.HasField("name"):
            entry["name"] = message.name
        plain.append(entry)
    return normalize_messages(plain)


def delta_response(engine: EngineApi, delta: Delta) -> pb.GenerateResponse:
    """One delta as a message of the stream."""
    response = pb.GenerateResponse(index=delta.index, text=delta.text, token_ids=delta.token_ids)
    if delta.logprobs is not None:
        for token_id, position in zip(delta.token_ids, delta.logprobs, strict=True):
            response.logprobs.append(_position(engine.tokenizer, token_id, position))
    if delta.finish_reason is not None:
        response.finish_reason = _FINISH_REASONS[FinishReason(delta.finish_reason)]
    if isinstance(delta.stop_reason, str):
        response.stop_string = delta.stop_reason
    elif delta.stop_reason is not None:
        response.stop_token_id = delta.stop_reason
    return response


def prompt_scores(
    tokenizer: TokenizerApi, token_ids: list[int], positions: list[TokenLogprobs | None]
) -> pb.PromptScores:
    """Scores of prompt tokens 1, 2, ...; entry 0, which has none, is left out."""
    scores = pb.PromptScores()
    for token_id, position in zip(token_ids, positions, strict=True):
        if position is not None:
            scores.positions.append(_position(tokenizer, token_id, position))
    return scores


def error_metadata(error: ApiError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata of an error: its code, and when to try again."""
    metadata: list[tuple[str, str]] = []
    if error.code is not None:
        metadata.append(("error-code", error.code))
    if error.retry_after_s is not None:
        metadata.append(("retry-after", error.headers()["Retry-After"]))
        metadata.append(("grpc-retry-pushback-ms", str(round(error.retry_after_s * 1000))))
    return tuple(metadata)


def _position(tokenizer: TokenizerApi, token_id: int, position: TokenLogprobs) -> pb.PositionLogprobs:
    likeliest = sorted(position, key=lambda other: (-position[other].logprob, other))
    return pb.PositionLogprobs(
        chosen=_token(tokenizer, token_id, position), top=[_token(tokenizer, other, position) for other in likeliest]
    )


def _token(tokenizer: TokenizerApi, token_id: int, position: TokenLogprobs) -> pb.TokenLogprob:
    entry = position[token_id]
    return pb.TokenLogprob(
        token_id=token_id, logprob=entry.logprob, rank=entry.rank, token=tokenizer.token_bytes(token_id)
    )

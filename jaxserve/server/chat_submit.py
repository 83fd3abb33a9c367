"""From checked messages and tools to a running stream: what every route with messages does alike."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.core import Terms
from jaxserve.server.engine_api import StreamApi
from jaxserve.server.errors import ApiError
from jaxserve.server.messages import ChatEnd
from jaxserve.server.schema import GenerationRequest
from jaxserve.server.service import GenerationService
from jaxserve.server.structured_fields import Constraint
from jaxserve.server.tool_reading import ToolReading
from jaxserve.server.tools import ToolUse


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request wants continued.

    Attributes:
      messages: as `normalize_messages` gives them.
      param: the request's field that they come from.
      end: how their text ends.
      variables: more of the chat template's.
      tools: what the model may call; None: nothing.
    """

    messages: list[dict[str, Any]]
    param: str
    end: ChatEnd = ChatEnd.GENERATION_PROMPT
    variables: dict[str, Any] | None = None
    tools: ToolUse | None = None


class ChatAnswer[Spec: GenerationRequest]:
    """What the answers of these routes hold alike; each renders them its own way, see `streaming.Answer`.

    Args:
      stream, reading: what `submit_chat` gave.
    """

    def __init__(
        self, service: GenerationService, spec: Spec, request_id: str, stream: StreamApi, reading: ToolReading
    ) -> None:
        self.request_id = request_id
        self.streams: Sequence[StreamApi] = [stream]
        self.is_stream = bool(spec.stream)
        self._engine = service.engine
        self._spec = spec
        self._stream = stream
        self._reading = reading
        self._created = int(time.time())


async def submit_chat(
    service: GenerationService,
    spec: GenerationRequest,
    conversation: Conversation,
    request_id: str,
    terms: Terms,
    **sampling: Any,
) -> tuple[StreamApi, ToolReading]:
    """The stream of a conversation's continuations, and how they are read.

    Args:
      sampling: settings over those of `spec`.

    Raises:
      ApiError: 400, in any field; what `GenerationService` raises.
    """
    use = conversation.tools
    kept = spec.kept_tokens(service.engine.max_model_len)
    tools = use.tools if use else None
    prompt = await service.encode_chat(
        conversation.messages,
        conversation.end,
        conversation.variables,
        tools=tools,
        param=conversation.param,
        num_choices=spec.num_choices,
    )
    reading = ToolReading(service.engine.tokenizer, service.tool_call_parser, use)
    if kept is not None:
        prompt = prompt[-kept:]
    wanted = grammar = None
    if spec.constrained or reading.is_forced:
        wanted, grammar = await service.constrain(lambda: _constraint(spec, reading), 1, spec.num_choices)
    params = spec.sampling_params(structured_outputs=wanted, **reading.sampling, **sampling)
    (stream,) = await service.submit([prompt], lambda _: params, request_id, terms, grammar, spec.model)
    return stream, reading


def _constraint(spec: GenerationRequest, reading: ToolReading) -> Constraint | None:
    asked = spec.constraint()
    if asked is None:
        return reading.constraint()
    if reading.has_tools:
        message = (
            f"{asked.field} holds for the whole output, which then has no calls;"
            " leave out tools or set tool_choice to none"
        )
        raise ApiError("invalid", message, param=asked.field)
    return asked

"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import orjson

from jaxserve.core import RequestOutput
from jaxserve.server.chat_submit import ChatAnswer, Conversation, submit_chat
from jaxserve.server.errors import stream_error, unfinished_error
from jaxserve.server.logprobs import chat_logprobs, prompt_logprobs
from jaxserve.server.messages import chat_end, normalize_messages
from jaxserve.server.output_reader import CallArguments, CallStart, Content, Message, OutputReader, Piece
from jaxserve.server.schema import ChatRequest
from jaxserve.server.service import GenerationService, new_request_id
from jaxserve.server.sse import DONE, ChunkWriter, error_event, finish_members, member, usage, usage_so_far
from jaxserve.server.streaming import Answer
from jaxserve.server.tools import parse_tools


async def begin_chat_completion(
    service: GenerationService, body: dict[str, Any], headers: Mapping[str, str], tenant: str = ""
) -> Answer:
    """Submits one request; its answer comes from the streams. Raises what `to_api_error` maps.

    `tenant`: of the caller's key, where it has one.
    """
    spec = ChatRequest.parse(body)
    service.check_ready(spec.model)
    messages = normalize_messages(spec.messages)
    end = chat_end(messages, spec.add_generation_prompt, spec.continue_final_message)
    conversation = Conversation(
        messages,
        "messages",
        end,
        spec.chat_template_kwargs,
        parse_tools(spec.tools, spec.tool_choice, spec.parallel_tool_calls),
    )
    logprobs = (spec.top_logprobs or 0) if spec.logprobs else None
    request_id = spec.request_id or new_request_id("chatcmpl")
    stream, reading = await submit_chat(
        service,
        spec,
        conversation,
        request_id,
        spec.terms(headers, tenant),
        max_tokens=spec.max_tokens,
        logprobs=logprobs,
    )
    return _Answer(service, spec, request_id, stream, reading)


class _Answer(ChatAnswer[ChatRequest]):
    """Renders one chat's outputs."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response of a request without `stream`."""
        output = outputs[0]
        choices = []
        for choice in output.outputs:
            error = unfinished_error(choice.finish_reason, self._engine.state)
            if error is not None:
                raise error
            logprobs = None
            if self._spec.logprobs:
                top = self._spec.top_logprobs or 0
                logprobs = chat_logprobs(self._engine.tokenizer, choice.token_ids, choice.logprobs or [], top)
            reader = self._reading.output()
            message = Message()
            for piece in reader.feed(choice.text, True):
                message.add(piece)
            entry: dict[str, Any] = {
                "index": choice.index,
                "message": _message(message),
                "logprobs": logprobs,
                "finish_reason": reader.finish_reason(choice.finish_reason),
                "stop_reason": choice.stop_reason,
            }
            if self._spec.return_token_ids:
                entry["token_ids"] = choice.token_ids
            choices.append(entry)
        completion_tokens = sum(len(choice.token_ids) for choice in output.outputs)
        answer = self._head() | {
            "object": "chat.completion",
            "choices": choices,
            "usage": usage(len(output.prompt_token_ids), completion_tokens, output.num_cached_tokens),
        }
        if self._spec.prompt_logprobs is not None:
            scores, count = output.prompt_logprobs, self._spec.prompt_logprobs
            answer["prompt_logprobs"] = prompt_logprobs(scores, output.prompt_token_ids, count)
        if self._spec.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer

    async def events(self) -> AsyncIterator[bytes]:
        """The server-sent events: per choice a role chunk, deltas and one finish; then usage and `[DONE]`."""
        spec = self._spec
        writer = ChunkWriter({"object": "chat.completion.chunk"} | self._head(), spec.include_usage)
        if spec.return_token_ids:
            writer.extra_first = member("prompt_token_ids", self._stream.prompt_token_ids)
        readers: dict[int, OutputReader] = {}
        num_tokens = 0
        try:
            async for delta in self._stream:
                error = unfinished_error(delta.finish_reason, self._engine.state)
                if error is not None:
                    raise error
                before = self._usage_so_far(num_tokens)
                num_tokens += len(delta.token_ids)
                if delta.index not in readers:
                    readers[delta.index] = self._reading.output()
                    yield writer.chunk(delta.index, _ROLE, more=b',"logprobs":null', usage=before)
                reader = readers[delta.index]
                payloads = [_payload(piece) for piece in reader.feed(delta.text, bool(delta.finish_reason))]
                shown = spec.logprobs or spec.return_token_ids
                if not payloads and not delta.finish_reason and not (shown and delta.token_ids):
                    continue
                more = b',"logprobs":null'
                if spec.logprobs:
                    top = spec.top_logprobs or 0
                    entries = chat_logprobs(self._engine.tokenizer, delta.token_ids, delta.logprobs or [], top)
                    more = member("logprobs", entries)
                if spec.return_token_ids:
                    more += member("token_ids", delta.token_ids)
                if not payloads or (delta.finish_reason and reader.num_calls):
                    payloads.append(_NOTHING)  # clients look for a call's end in a chunk of its own
                for payload in payloads[:-1]:
                    yield writer.chunk(delta.index, payload, more=more, usage=self._usage_so_far(num_tokens))
                    more = b',"logprobs":null'  # of the delta, told once
                finish = finish_members(reader.finish_reason(delta.finish_reason), delta.stop_reason)
                yield writer.chunk(delta.index, payloads[-1], finish, more, self._usage_so_far(num_tokens))
        except Exception as exc:
            yield error_event(stream_error(exc, self._engine.state, f"request {self.request_id!r}"))
            return
        if spec.include_usage:
            yield writer.usage_chunk(
                usage(len(self._stream.prompt_token_ids), num_tokens, self._stream.num_cached_tokens)
            )
        yield DONE

    def _head(self) -> dict[str, Any]:
        return {"id": self.request_id, "created": self._created, "model": self._spec.model or self._engine.model_name}

    def _usage_so_far(self, num_tokens: int) -> dict[str, Any] | None:
        if not self._spec.continuous_usage:
            return None
        return usage_so_far(len(self._stream.prompt_token_ids), num_tokens)


_ROLE = b'"delta":{"role":"assistant","content":""}'
_NOTHING = b'"delta":{}'


def _message(message: Message) -> dict[str, Any]:
    answer: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.calls:
        answer["content"] = message.content or None
        answer["tool_calls"] = message.calls
    return answer


def _payload(piece: Piece) -> bytes:
    """The delta that tells a piece."""
    if isinstance(piece, Content):
        return b'"delta":{"content":' + orjson.dumps(piece.text) + b"}"
    call: dict[str, Any] = {"index": piece.index}
    match piece:
        case CallStart():
            call |= {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}}
        case CallArguments():
            call |= {"function": {"arguments": piece.text}}
    return b'"delta":{"tool_calls":[' + orjson.dumps(call) + b"]}"

"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import orjson

from jaxserve.core import RequestOutput, SamplingParams
from jaxserve.server.engine_api import Delta, StreamApi, TokenLogprobs
from jaxserve.server.errors import stream_error, unfinished_error
from jaxserve.server.logprobs import CompletionLogprobs, narrowed, prompt_logprobs
from jaxserve.server.schema import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from jaxserve.server.service import GenerationService, new_request_id
from jaxserve.server.sse import DONE, ChunkWriter, error_event, finish_members, member, usage, usage_so_far
from jaxserve.server.streaming import Answer, merge


async def begin_completion(
    service: GenerationService, body: dict[str, Any], headers: Mapping[str, str], tenant: str = ""
) -> Answer:
    """Submits one request; its answer comes from the streams. Raises what `to_api_error` maps.

    `tenant`: of the caller's key, where it has one.
    """
    spec = CompletionRequest.parse(body)
    service.check_ready(spec.model)
    max_model_len = service.engine.max_model_len
    if spec.logprobs is not None:
        service.check_tokenizer()
    prompts, echoes = await _prompts(service, spec)
    wanted = grammar = None
    if spec.constrained:
        wanted, grammar = await service.constrain(spec.constraint, len(prompts), spec.num_choices)

    def params_of(num_prompt_tokens: int) -> SamplingParams:
        overrides: dict[str, Any] = {"logprobs": spec.logprobs, "structured_outputs": wanted}
        if spec.max_tokens is None:
            # At least 1: a prompt without room for a token is the engine's to refuse, naming both lengths.
            room = max(1, max_model_len - num_prompt_tokens)
            overrides["max_tokens"] = max(min(DEFAULT_COMPLETION_TOKENS, room), min(spec.min_tokens or 0, room))
        if spec.echo and spec.logprobs is not None:
            overrides["prompt_logprobs"] = max(spec.logprobs, spec.prompt_logprobs or 0)
        return spec.sampling_params(**overrides)

    request_id = spec.request_id or new_request_id("cmpl")
    streams = await service.submit(prompts, params_of, request_id, spec.terms(headers, tenant), grammar, spec.model)
    return _Answer(service, spec, request_id, echoes, streams)


async def _prompts(service: GenerationService, spec: CompletionRequest) -> tuple[list[list[int]], Sequence[str | None]]:
    """Token ids of each prompt, and what `echo` shows of it."""
    max_model_len = service.engine.max_model_len
    kept = spec.kept_tokens(max_model_len)
    given = spec.prompts(max_model_len)
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    prompts = [prompt for prompt in given if isinstance(prompt, list)]
    if texts:  # prompts are all texts or all ids
        add_special = spec.add_special_tokens is not False
        prompts = await service.encode(texts, add_special, param="prompt", num_choices=spec.num_choices)
    shown: list[str | list[int]] = list(given)
    if kept is not None:
        for index, ids in enumerate(prompts):
            if len(ids) > kept:
                shown[index] = prompts[index] = ids[-kept:]
    if not spec.echo:
        return prompts, [None] * len(prompts)
    size = 4 * sum(map(len, shown))
    return prompts, await service.run(size, lambda: [_echo_text(service, prompt) for prompt in shown])


def _echo_text(service: GenerationService, prompt: str | list[int]) -> str:
    """What `echo` shows of a prompt; ids that the engine is going to refuse are skipped."""
    if isinstance(prompt, str):
        return prompt
    return service.engine.tokenizer.decode([token_id for token_id in prompt if token_id >= 0], False)


class _Answer:
    """Renders one request's outputs; choice number = prompt number * n + choice of that prompt."""

    def __init__(
        self,
        service: GenerationService,
        spec: CompletionRequest,
        request_id: str,
        echoes: Sequence[str | None],
        streams: Sequence[StreamApi],
    ) -> None:
        self.request_id = request_id
        self.streams = streams
        self.is_stream = bool(spec.stream)
        self._engine = service.engine
        self._spec = spec
        self._num_prompt_tokens = sum(len(stream.prompt_token_ids) for stream in streams)
        self._head = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": spec.model or self._engine.model_name,
        }
        self._echoes = echoes

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response of a request without `stream`."""
        choices = []
        for number, output in enumerate(outputs):
            for choice in output.outputs:
                error = unfinished_error(choice.finish_reason, self._engine.state)
                if error is not None:
                    raise error
                entry: dict[str, Any] = {
                    "index": number * self._spec.num_choices + choice.index,
                    "text": (self._echoes[number] or "") + choice.text,
                    "logprobs": self._logprobs(number, output, choice.token_ids, choice.logprobs),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                if self._spec.prompt_logprobs is not None:
                    count = self._spec.prompt_logprobs
                    entry["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, output.prompt_token_ids, count)
                if self._spec.return_token_ids:
                    entry["token_ids"] = choice.token_ids
                    entry["prompt_token_ids"] = output.prompt_token_ids
                choices.append(entry)
        completion_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
        cached = sum(output.num_cached_tokens for output in outputs)
        return self._head | {"choices": choices, "usage": usage(self._num_prompt_tokens, completion_tokens, cached)}

    def _logprobs(
        self, number: int, output: RequestOutput, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> dict[str, Any] | None:
        if self._spec.logprobs is None:
            return None
        builder = self._builder(number)
        if not self._spec.echo:
            return builder.add(token_ids, logprobs or [])
        echoed = narrowed(output.prompt_logprobs, output.prompt_token_ids, self._spec.logprobs)
        return builder.add([*output.prompt_token_ids, *token_ids], [*echoed, *(logprobs or [])])

    def _builder(self, number: int) -> CompletionLogprobs:
        """For a choice of prompt `number`."""
        prompt = self.streams[number].prompt_token_ids
        skip = self._spec.skip_special_tokens is not False
        return CompletionLogprobs(self._engine.tokenizer, prompt, skip, self._echoes[number])

    async def events(self) -> AsyncIterator[bytes]:
        """The server-sent events of a request with `stream`."""
        spec, n = self._spec, self._spec.num_choices
        writer = ChunkWriter(self._head, spec.include_usage)
        builders: dict[int, CompletionLogprobs] = {}
        begun: set[int] = set()
        num_tokens = 0
        try:
            async for number, delta in self._in_echo_order():
                error = unfinished_error(delta.finish_reason, self._engine.state)
                if error is not None:
                    raise error
                num_tokens += len(delta.token_ids)
                index = number * n + delta.index
                token_ids: list[int] = delta.token_ids
                positions: list[Any] = delta.logprobs or []
                text = delta.text
                more = b""
                if index not in begun:
                    begun.add(index)
                    text = (self._echoes[number] or "") + text
                    if spec.return_token_ids:
                        more += member("prompt_token_ids", self.streams[number].prompt_token_ids)
                    if spec.echo and spec.logprobs is not None:
                        token_ids = [*self.streams[number].prompt_token_ids, *token_ids]
                        positions = [*(delta.prompt_logprobs or []), *positions]
                shown = spec.logprobs is not None or spec.return_token_ids
                if not text and not delta.finish_reason and not (shown and token_ids):
                    continue
                if spec.logprobs is None:
                    more = b',"logprobs":null' + more
                else:
                    if index not in builders:
                        builders[index] = self._builder(number)
                    more = member("logprobs", builders[index].add(token_ids, positions)) + more
                if spec.return_token_ids:
                    more += member("token_ids", delta.token_ids)
                payload = b'"text":' + orjson.dumps(text)
                finish = finish_members(delta.finish_reason, delta.stop_reason)
                so_far = usage_so_far(self._num_prompt_tokens, num_tokens) if spec.continuous_usage else None
                yield writer.chunk(index, payload, finish, more, so_far)
        except Exception as exc:
            yield error_event(stream_error(exc, self._engine.state, f"request {self.request_id!r}"))
            return
        if spec.include_usage:
            cached = sum(stream.num_cached_tokens for stream in self.streams)
            yield writer.usage_chunk(usage(self._num_prompt_tokens, num_tokens, cached))
        yield DONE

    async def _in_echo_order(self) -> AsyncIterator[tuple[int, Delta]]:
        """Deltas as they come; with echoed logprobs each choice's first delta carries its prompt's.

        The engine gives them with choice 0's first delta only, so a prompt's other choices wait for it.
        """
        merged = merge(self.streams)
        if not (self._spec.echo and self._spec.logprobs is not None):
            async for item in merged:
                yield item
            return
        scores: dict[int, list[TokenLogprobs | None]] = {}
        waiting: dict[int, list[Delta]] = {}
        begun: set[tuple[int, int]] = set()

        def with_scores(number: int, delta: Delta) -> tuple[int, Delta]:
            if (number, delta.index) not in begun:
                begun.add((number, delta.index))
                delta.prompt_logprobs = scores[number]
            return number, delta

        async for number, delta in merged:
            if delta.prompt_logprobs is not None:
                scores[number] = delta.prompt_logprobs
            if number not in scores and delta.finish_reason is None:
                waiting.setdefault(number, []).append(delta)
                continue
            if number not in scores:  # ended without scores: an abort or expiry, which is reported as it is
                scores[number] = [None] * len(self.streams[number].prompt_token_ids)
            for held in waiting.pop(number, ()):
                yield with_scores(number, held)
            yield with_scores(number, delta)

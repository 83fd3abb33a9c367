"""GenerationService: what HTTP and gRPC share between a parsed request and the engine's streams."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxserve.core import SamplingParams
from jaxserve.server.engine_api import EngineApi, StreamApi
from jaxserve.server.errors import ApiError

INLINE_CHARS = 2000
"""Texts up to this long are tokenised on the event loop (tens of microseconds); longer ones in a thread."""


class GenerationService:
    """Tokenises and submits on behalf of both fronts.

    Args:
      engine: may still be loading; every method answers 503 until it is ready.
    """

    def __init__(self, engine: EngineApi) -> None:
        self.engine = engine
        self._longest_token = 0
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    def close(self) -> None:
        """Ends the worker threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check_ready(self, model: str | None = None) -> None:
        """Raises ApiError 503 unless the engine takes requests, 404 when `model` is another model."""
        state = self.engine.state
        if state in ("loading", "warming_up"):
            done, total, what = self.engine.progress
            message = f"the model is not ready: {what} ({done} of {total})"
            raise ApiError("unavailable", message, code=state, retry_after_s=5.0)
        if state == "draining":
            raise ApiError("unavailable", "the server is shutting down", code=state, retry_after_s=5.0)
        if state != "ready":  # dead or stopped
            message = "the engine stopped; the server must be restarted"
            raise ApiError("unavailable", message, code="engine_dead", retry_after_s=30.0)
        if model is not None and model != self.engine.model_name:
            message = f"the model {model[:200]!r} does not exist; this server has {self.engine.model_name!r}"
            raise ApiError("not_found", message, param="model", code="model_not_found")

    def check_tokenizer(self) -> None:
        """Raises ValueError when the engine has no tokenizer; for what cannot be answered without one."""
        _ = self.engine.tokenizer

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return await self._run(len(text), lambda: self.engine.tokenizer.encode(text, add_special_tokens))

    def check_fits(self, num_chars: int, param: str) -> None:
        """Refuses a text that the context cannot hold whatever its tokens, before seconds go into finding them.

        Raises:
          ApiError: 400.
        """
        if num_chars <= INLINE_CHARS:
            return
        tokenizer, limit = self.engine.tokenizer, self.engine.max_model_len
        if not self._longest_token:
            self._longest_token = max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))
        if num_chars > limit * self._longest_token:
            message = (
                f"{param} has {num_chars} characters; the limit is {limit} tokens (max_model_len),"
                f" each of at most {self._longest_token} bytes"
            )
            raise ApiError("invalid", message, param=param, code="context_length_exceeded")

    async def encode_chat(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Token ids of messages rendered by the model's chat template.

        Raises:
          ValueError: the template refused them (its message is quoted) or there is no template.
        """
        size = sum(len(message["content"]) for message in messages) + 50 * len(messages)
        tokenizer = self.engine.tokenizer
        return await self._run(size, lambda: tokenizer.encode_chat(messages, add_generation_prompt, **kwargs))

    async def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids.

        Raises:
          ApiError: 400, an id outside the vocabulary.
        """
        vocab_size = self.engine.tokenizer.vocab_size
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise ApiError("invalid", f"token id {token_id} is outside [0, {vocab_size})", param="tokens")
        return await self._run(4 * len(ids), lambda: self.engine.tokenizer.decode(ids, skip_special_tokens))

    def submit(
        self,
        prompts: Sequence[list[int]],
        params_of: Callable[[int], SamplingParams],
        request_id: str,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> list[StreamApi]:
        """One stream per prompt; when one is refused the earlier ones are cancelled.

        Args:
          prompts: token ids of each.
          params_of: sampling settings for a prompt of that many tokens.
          request_id: of a single prompt; prompt i of several is `request_id-i`.
        """
        streams: list[StreamApi] = []
        try:
            for index, ids in enumerate(prompts):
                if not ids:
                    raise ApiError("invalid", "the prompt has no tokens; give at least one", param="prompt")
                streams.append(
                    self.engine.submit(
                        prompt_token_ids=ids,
                        params=params_of(len(ids)),
                        request_id=request_id if len(prompts) == 1 else f"{request_id}-{index}",
                        priority=priority,
                        deadline_s=deadline_s,
                    )
                )
        except BaseException:
            cancel_all(streams)
            raise
        return streams

    async def _run[T](self, size: int, work: Callable[[], T]) -> T:
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def new_request_id(prefix: str) -> str:
    """A fresh id, as `cmpl-3f0c...`."""
    return f"{prefix}-{uuid.uuid4().hex}"


def cancel_all(streams: Sequence[StreamApi]) -> None:
    """Aborts every choice that still runs; finished ones are left as they are."""
    for stream in streams:
        stream.cancel()

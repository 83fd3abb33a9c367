"""GenerationService: what HTTP and gRPC share between a parsed request and the engine's streams."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxserve.config.tool_parsers import AUTO_TOOL_CALL_PARSER
from jaxserve.core import NO_TERMS, RejectedError, SamplingParams, StructuredOutputs, Submission, Terms
from jaxserve.core.sampling_params import MAX_NUM_CHOICES
from jaxserve.server.engine_api import EngineApi, RemotePrefillApi, StreamApi, TokenizerApi
from jaxserve.server.errors import ApiError
from jaxserve.server.health import Health, health_of
from jaxserve.server.messages import ChatEnd
from jaxserve.server.structured_fields import Constraint
from jaxserve.text.chat_template import ChatTemplateLimitError
from jaxserve.text.template_limits import NotQuickError, quick_rendering
from jaxserve.text.tool_forms import ToolForms

INLINE_CHARS = 1000
"""Work on so many characters in all is done on the event loop (about half a millisecond); more in a thread."""
CALL_CHARS = 50
"""What a text costs besides its characters, in characters."""
MAX_DETOKENIZE_IDS = 1 << 20
MAX_WAITING_GRAMMARS = 64
"""Constraints being compiled or waiting for it; a request with one more is answered 429."""
MAX_VARIABLES_CHARS = 1 << 16
RESERVED_TEMPLATE_NAMES = ("messages", "tools", "add_generation_prompt", "continue_final_message")
"""Template variables that have their own place in a request."""


class GenerationService:
    """Tokenises and submits on behalf of both fronts.

    Args:
      engine: may still be loading; every method answers 503 until it is ready.
      tool_call_parser: name of the parser of tool calls, or "auto".
      remote_prefill: has prompts computed elsewhere before they are submitted; None: all are computed here.
    """

    def __init__(
        self,
        engine: EngineApi,
        tool_call_parser: str = AUTO_TOOL_CALL_PARSER,
        remote_prefill: RemotePrefillApi | None = None,
    ) -> None:
        self.engine = engine
        self._remote_prefill = remote_prefill
        self._leaving = self._draining = False
        self._num_fetching = 0
        self.tool_call_parser = tool_call_parser
        self._longest_token = 0
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="prompts")
        # Apart, so that calls that only convert never keep a prompt waiting.
        self._convert_threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        # Apart, as a large grammar takes seconds.
        self._grammar_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammars")
        self._waiting_grammars = 0
        # Apart, as what a model's template does may take a second.
        self._chat_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="chats")
        self._template_is_quick = True

    def close(self) -> None:
        """Ends the worker threads."""
        for threads in (self._threads, self._convert_threads, self._grammar_threads, self._chat_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def health(self) -> Health:
        """What probes are told: the engine's health, "draining" from `leave` on."""
        return health_of(self.engine, is_leaving=self._leaving)

    def leave(self) -> None:
        """Tells balancers that the server is about to drain; requests are still taken."""
        self._leaving = True

    def check_ready(self, model: str | None = None) -> None:
        """Raises ApiError 503 unless the engine takes requests, 404 when `model` is no model or adapter of it."""
        state = self.engine.state
        if self._draining and state == "ready":
            state = "draining"
        if state in ("loading", "warming_up"):
            done, total, what = self.engine.progress
            message = f"the model is not ready: {what} ({done} of {total})"
            raise ApiError("unavailable", message, code=state, retry_after_s=5.0)
        if state == "draining":
            raise ApiError("unavailable", "the server is shutting down", code=state, retry_after_s=5.0)
        if state == "stuck":
            message = f"the engine is stuck: it has made no step for {self.engine.step_age_s:.1f} s"
            raise ApiError("unavailable", message, code="engine_stuck", retry_after_s=30.0)
        if state != "ready":  # dead or stopped
            message = "the engine stopped; the server must be restarted"
            raise ApiError("unavailable", message, code="engine_dead", retry_after_s=30.0)
        if model is not None and model not in self.model_names():
            names = ", ".join(map(repr, self.model_names()))
            message = f"the model {model[:200]!r} does not exist; this server has {names}"
            raise ApiError("not_found", message, param="model", code="model_not_found")

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests, and waits for those whose prompts other servers are computing to be queued."""
        self._leaving = self._draining = True
        end = time.monotonic() + grace_s
        while self._num_fetching and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def model_names(self) -> list[str]:
        """What requests may name as their model: the model, then its LoRA adapters."""
        return [self.engine.model_name, *(adapter.name for adapter in self.engine.adapters.listed)]

    def check_tokenizer(self) -> None:
        """Raises ValueError when the engine has no tokenizer; for what cannot be answered without one."""
        _ = self.engine.tokenizer

    async def encode(
        self,
        texts: Sequence[str],
        add_special_tokens: bool = True,
        *,
        param: str,
        num_choices: int = 1,
        converts: bool = False,
    ) -> list[list[int]]:
        """Token ids of each text.

        Args:
          param: the request field to name in an error.
          num_choices: asked for of each text, as the request says; they are counted where it is refused here.
          converts: nothing is generated from them; see `decode`.

        Raises:
          ApiError: 400; one cannot fit the context.
        """
        for text in texts:
            await self._check_fits(len(text), param)
        tokenizer = self.engine.tokenizer
        size = sum(map(len, texts)) + CALL_CHARS * (len(texts) - 1)
        if not converts:
            self._refuse_work(size, len(texts), num_choices)
        return await self.run(size, lambda: [tokenizer.encode(text, add_special_tokens) for text in texts], converts)

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        end: ChatEnd = ChatEnd.GENERATION_PROMPT,
        variables: Mapping[str, Any] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        param: str,
        num_choices: int = 1,
        converts: bool = False,
    ) -> list[int]:
        """Token ids of messages rendered by the model's chat template.

        Args:
          end: how the text ends.
          variables: more of the template's variables (`chat_template_kwargs`).
          tools: what the model may call.
          param, num_choices, converts: see `encode`.

        Raises:
          ApiError: 400; they cannot fit the context, a variable's name is taken, or the template does not write
            tools, or calls.
          ValueError: the template refused them (its message is quoted) or there is no template.
        """
        variables = variables or {}
        for name in RESERVED_TEMPLATE_NAMES:
            if name in variables:
                message = f"chat_template_kwargs has {name!r}, which is a field of the request; set it there"
                raise ApiError("invalid", message, param="chat_template_kwargs")
        texts = sum(map(_message_chars, messages))
        await self._check_fits(texts, param)
        given = num_chars(variables, MAX_VARIABLES_CHARS)
        if given > MAX_VARIABLES_CHARS:
            message = f"chat_template_kwargs is too large; the limit is {MAX_VARIABLES_CHARS} characters"
            raise ApiError("invalid", message, param="chat_template_kwargs")
        tokenizer = self.engine.tokenizer
        with_calls = any("tool_calls" in message for message in messages)
        if tools or with_calls:
            # In a thread: the first time, it renders.
            forms = await self._run_in(self._chats(converts), lambda: tokenizer.tool_forms)
            _check_forms(forms, bool(tools), with_calls, param)
        size = texts + given + CALL_CHARS * len(messages) + (num_chars(tools, INLINE_CHARS) if tools else 0)
        if not converts:
            self._refuse_work(size, 1, num_choices)
        opens, continues = end is ChatEnd.GENERATION_PROMPT, end is ChatEnd.CONTENT

        def work() -> list[int]:
            return tokenizer.encode_chat(messages, opens, tools=tools, continue_final_message=continues, **variables)

        if size <= INLINE_CHARS and self._template_is_quick:
            try:
                with quick_rendering():
                    return work()
            except NotQuickError:
                pass
            except ChatTemplateLimitError:
                self._template_is_quick = False  # the event loop has no time for it
        return await self._run_in(self._chats(converts), work)

    def _chats(self, converts: bool) -> ThreadPoolExecutor:
        return self._convert_threads if converts else self._chat_threads

    async def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids, found in the threads that prompts do not wait for.

        Raises:
          ApiError: 400; too many ids, or one outside the vocabulary.
        """
        if len(ids) > MAX_DETOKENIZE_IDS:
            raise ApiError("invalid", f"tokens has {len(ids)} ids; the limit is {MAX_DETOKENIZE_IDS}", param="tokens")
        tokenizer = self.engine.tokenizer
        vocab_size = tokenizer.vocab_size

        def work() -> str:
            if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
                outside = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
                raise ApiError("invalid", f"token id {outside} is outside [0, {vocab_size})", param="tokens")
            return tokenizer.decode(ids, skip_special_tokens)

        return await self.run(4 * len(ids), work, True)

    async def token_texts(self, ids: list[int]) -> list[str]:
        """Each token's own text."""
        token_text = self.engine.tokenizer.token_text
        return await self.run(4 * len(ids), lambda: [token_text(token_id) for token_id in ids], True)

    async def constrain(
        self, make: Callable[[], Constraint | None], num_prompts: int = 1, num_choices: int = 1
    ) -> tuple[StructuredOutputs | None, object | None]:
        """What a request's output must be, and its grammar, found in a thread; both None where it may be anything.

        Args:
          make: reads the constraint from the request.
          num_prompts: of the request; num_choices: see `encode`.

        Raises:
          ApiError: 400, the constraint is malformed or cannot be followed; 429, too many wait for that.
        """
        if self._waiting_grammars >= MAX_WAITING_GRAMMARS:
            message = f"{MAX_WAITING_GRAMMARS} constraints wait to be compiled already; try again later"
            raise ApiError("overloaded", message, code="grammars_waiting", retry_after_s=1.0)
        self._refuse_work(INLINE_CHARS + 1, num_prompts, num_choices)
        engine = self.engine

        def work() -> tuple[StructuredOutputs | None, object | None]:
            constraint = make()
            if constraint is None:
                return None, None
            try:
                return constraint.wanted, engine.compile_grammar(constraint.wanted)
            except ValueError as error:
                raise constraint.error(str(error)) from None

        self._waiting_grammars += 1
        try:
            return await self._run_in(self._grammar_threads, work)
        finally:
            self._waiting_grammars -= 1

    def _refuse_work(self, size: int, num_prompts: int, num_choices: int) -> None:
        """Raises RejectedError where the queue is full and the work of finding that out in turn is not small.

        Threads that tokenise what is refused in the end would hold up every refusal, and what runs.
        """
        if size <= INLINE_CHARS or (rejection := self.engine.load.full) is None:
            return
        # Of a number that is still to be checked, the next valid one.
        self.engine.metrics.rejected(rejection.reason, num_prompts * min(max(num_choices, 1), MAX_NUM_CHOICES))
        raise RejectedError(rejection)

    async def _check_fits(self, num_chars: int, param: str) -> None:
        """Refuses a text that the context cannot hold whatever its tokens, before seconds go into finding them."""
        limit = self.engine.max_model_len
        if num_chars <= max(limit, INLINE_CHARS):
            return
        if not self._longest_token:
            tokenizer = self.engine.tokenizer
            self._longest_token = await self.run(tokenizer.vocab_size, lambda: _longest_token(tokenizer))
        if num_chars > limit * self._longest_token:
            message = (
                f"{param} has {num_chars} characters; the limit is {limit} tokens (max_model_len),"
                f" each of at most {self._longest_token} bytes"
            )
            raise ApiError("invalid", message, param=param, code="context_length_exceeded")

    async def submit(
        self,
        prompts: Sequence[list[int]],
        params_of: Callable[[int], SamplingParams],
        request_id: str,
        terms: Terms = NO_TERMS,
        grammar: object | None = None,
        model: str | None = None,
    ) -> Sequence[StreamApi]:
        """One stream per prompt; all are taken or refused together.

        Args:
          prompts: token ids of each.
          params_of: sampling settings for a prompt of that many tokens.
          request_id: of a single prompt; prompt i of several is `request_id-i`.
          grammar: what `constrain` gave.
          model: the model's name, or an adapter's; None: the model.

        Raises:
          ValueError, RejectedError: see `AsyncEngine.submit`.
        """
        adapter = "" if model is None or model == self.engine.model_name else model
        names = [request_id] if len(prompts) == 1 else [f"{request_id}-{index}" for index in range(len(prompts))]
        submissions = [
            Submission(ids, params_of(len(ids)), name, terms, grammar=grammar, adapter=adapter)
            for ids, name in zip(prompts, names, strict=True)
        ]
        if self._remote_prefill is None:
            return self.engine.submit_all(submissions)
        self._num_fetching += 1
        try:
            fetched = await self._remote_prefill.fetch(submissions)
            try:
                return self.engine.submit_all(fetched)
            except BaseException:
                self._remote_prefill.release(fetched)
                raise
        finally:
            self._num_fetching -= 1

    async def run[T](self, size: int, work: Callable[[], T], converts: bool = False) -> T:
        """The result of `work`, done in a thread unless it is small.

        Args:
          size: about how many characters it goes over.
          converts: see `encode`.
        """
        if size <= INLINE_CHARS:
            return work()
        return await self._run_in(self._convert_threads if converts else self._threads, work)

    async def _run_in[T](self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, work)


def _longest_token(tokenizer: TokenizerApi) -> int:
    return max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))


def _check_forms(forms: ToolForms | None, with_tools: bool, with_calls: bool, param: str) -> None:
    """Refuses tools and calls that the template would leave out in silence."""
    if forms is None:
        return  # without a template nothing can be rendered, which encode_chat says
    if with_tools and not forms.writes_tools:
        message = "tools are not available: the model's chat template does not write them into the prompt"
        raise ApiError("invalid", message, param="tools")
    if with_calls and not forms.writes_calls:
        message = f"{param} has tool calls, which the model's chat template does not write into the prompt"
        raise ApiError("invalid", message, param=param)


def _message_chars(message: Mapping[str, Any]) -> int:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = sum(len(function["name"]) + len(function["arguments"]) for function in functions)
    return len(message["content"]) + len(message.get("name", "")) + calls


def num_chars(value: Any, limit: int) -> int:
    """About how much text a JSON value is; counting ends above `limit`."""
    size, left = 0, [value]
    while left and size <= limit:
        item = left.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, list):
            left += item
        elif isinstance(item, dict):
            left += item
            left += item.values()
        size += 1
    return size


def new_request_id(prefix: str) -> str:
    """A fresh id, as `cmpl-3f0c...`."""
    return f"{prefix}-{uuid.uuid4().hex}"


def cancel_all(streams: Sequence[StreamApi]) -> None:
    """Aborts every choice that still runs; finished ones are left as they are."""
    for stream in streams:
        stream.cancel()

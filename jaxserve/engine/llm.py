"""LLM: offline generation in the caller's thread, with vLLM's shapes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxserve.config import EngineConfig
from jaxserve.core import NO_TERMS, Adapter, CompletionOutput, RequestOutput, SamplingParams, Submission, Terms
from jaxserve.engine.engine import Engine
from jaxserve.engine.output_processor import OutputDelta
from jaxserve.engine.stream import append_delta

Prompt = str | Sequence[int]


class LLM:
    """A model for batch use.

    Args:
      model: demo name, directory, .gguf file, Orbax directory or hub id.
      **settings: fields of `EngineConfig`.

    Raises:
      ValueError: an unknown setting or one that does not fit.

    Example:
      >>> llm = LLM("smollm2-135m")
      >>> llm.generate(["The sea"], SamplingParams(max_tokens=8))[0].outputs[0].text
    """

    def __init__(self, model: str = "smollm2-135m", **settings: Any) -> None:
        # Everything a caller hands over at once is queued at once: the queue has no reason to refuse.
        settings.setdefault("max_queue_requests", 1 << 30)
        settings.setdefault("max_queue_tokens", 1 << 60)
        try:
            config = EngineConfig(model=model, **settings)
        except TypeError as error:
            raise ValueError(f"{error}; the settings are the fields of EngineConfig") from error
        self.engine = Engine(config)
        self.engine.warm_up()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        terms: Terms | Sequence[Terms] | None = None,
        lora: str | Sequence[str] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts, in their order.

        Args:
          prompts: text or token ids, one or several.
          params: one for all or one each.
          terms: what is asked of the scheduler (priority, service class, ...), one for all or one each.
          lora: name of a loaded LoRA adapter, or "" for none; one for all or one each.
          use_tqdm: show a progress bar on stderr (the name is vLLM's).

        Raises:
          ValueError: a prompt or setting is bad; nothing has run then.
          RejectedError: an adapter is not loaded; the same.
        """
        listed = _as_list(prompts)
        each = _one_each("sampling settings", listed, params, SamplingParams())
        terms_of_each = _one_each("terms", listed, terms, NO_TERMS)
        lora_of_each = _one_each("adapters (lora)", listed, lora, "")
        outputs = [self._output(str(i), p, s) for i, (p, s) in enumerate(zip(listed, each, strict=True))]
        requests = [
            self.engine.make_requests(
                Submission(output.prompt_token_ids, s, output.request_id, t, adapter=adapter), now=time.monotonic()
            )
            for output, s, t, adapter in zip(outputs, each, terms_of_each, lora_of_each, strict=True)
        ]
        with _bar(use_tqdm) as bar:
            task = bar.add_task("generate", total=len(outputs), rate=0.0)
            tracker = _Tracker(bar, task)
            try:
                for output, choices in zip(outputs, requests, strict=True):
                    tracker.left[output.request_id] = len(choices)
                    for index, request in enumerate(choices):
                        self.engine.add(request, index, partial(tracker.take, output))
                while self.engine.has_work:
                    self.engine.step()
            except BaseException:
                self.engine.abort_all()
                raise
        return outputs

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        lora: str | Sequence[str] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes conversations through the model's chat template.

        Args:
          messages: one conversation, or several.
          tools: functions that the model may call, in OpenAI's form; calls are in the text, as the model writes them
            (`jaxserve.text.tool_calls` reads them).
          lora: see `generate`.

        Raises:
          ValueError: the model has no chat template, or it refuses the messages.
        """
        if messages and isinstance(messages[0], dict):
            messages = [messages]  # type: ignore[list-item]
        prompts = [self.engine.tokenizer.encode_chat(list(conversation), tools=tools) for conversation in messages]
        return self.generate(prompts, params, lora=lora, use_tqdm=use_tqdm)

    @property
    def lora_adapters(self) -> tuple[Adapter, ...]:
        """The LoRA adapters that `lora` may name."""
        return self.engine.adapters.listed

    def load_lora_adapter(self, name: str, path: str) -> Adapter:
        """Loads a LoRA adapter from PEFT's folder, under a name that no loaded one has.

        Raises:
          ValueError: the setting `enable_lora` is off, the name is bad or taken, or `max_loras` are loaded.
          AdapterNotFoundError, CheckpointError, UnsupportedModelError: it cannot be read.
        """
        placed = self.engine.adapters.load(name, path)
        self.engine.adapters.place_pending()  # the caller's thread is the one that steps
        return placed.result()

    def unload_lora_adapter(self, name: str) -> None:
        """Frees an adapter's place and name.

        Raises:
          AdapterNotFoundError: none of that name is loaded.
        """
        self.engine.adapters.unload(name)

    def _output(self, request_id: str, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        text = prompt if isinstance(prompt, str) else None
        ids = self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return RequestOutput(request_id, text, ids, [CompletionOutput(index) for index in range(params.n)])


class _Tracker:
    """Fills outputs from deltas and moves the bar."""

    def __init__(self, bar: Progress, task: Any) -> None:
        self.left: dict[str, int] = {}
        self._bar = bar
        self._task = task
        self._tokens = 0

    def take(self, output: RequestOutput, delta: OutputDelta) -> None:
        append_delta(output.outputs[delta.index], delta)
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = delta.prompt_logprobs
        self._tokens += len(delta.token_ids)
        if delta.finish_reason is None:
            return
        if delta.index == 0:
            output.num_cached_tokens = delta.num_cached_tokens
        self.left[output.request_id] -= 1
        if self.left[output.request_id] == 0:
            elapsed = self._bar.tasks[self._task].elapsed or 1e-9
            self._bar.update(self._task, advance=1, rate=self._tokens / elapsed)


def _bar(visible: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tok/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not visible,
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each[T](what: str, prompts: list[Prompt], given: T | Sequence[T] | None, default: T) -> list[T]:
    """`given`, or the default, once per prompt."""
    if given is None or isinstance(given, type(default)):
        return [default if given is None else given] * len(prompts)
    listed: list[T] = list(given)  # type: ignore[arg-type]
    if len(listed) != len(prompts):
        raise ValueError(f"there are {len(prompts)} prompts and {len(listed)} {what}; give one for all or one each")
    return listed

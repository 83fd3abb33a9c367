"""Adapters: the LoRA adapters of an engine, by name, and their places on the device.

A place's life:

    free ─ reserve ─▶ loading ─ on the device ─▶ loaded ─ unload ─▶ leaving ─ its last request ends ─▶ free
                         └─ it cannot be read ─▶ free

Rules:
- What reads files may run in any thread; what writes a place is the thread that steps the engine, between two steps.
  The device's stream keeps the order: steps in flight still see what was there before.
- A request is let in, under the engine's lock, only while the loading it was made for is the loaded one; from then on
  it holds the place until it ends. So no request ever meets another adapter than its own.
- Each loading has a number of its own, which is part of its cached pages' names: pages of an earlier loading of the
  same name are never found.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.core import Adapter, AdapterNotFoundError, RejectedError, Rejection, Request
from jaxserve.engine.engine_lock import EngineLock
from jaxserve.loading.lora import read_lora
from jaxserve.models import ModelConfig, stored_rank

MAX_NAME = 256


class Adapters:
    """Adapters of an engine; without `enable_lora` there are none. Methods are for any thread but where they say.

    Args:
      config: of the engine; its `lora_modules` are read at once, and placed by the first `place_pending`.
      model_config, model_name: of the model.
      stacked: the layers' arrays are stacked.
      lock: the engine's.
      put: puts host arrays in a place.
      live_places: of the live requests.

    Raises:
      AdapterNotFoundError, CheckpointError, UnsupportedModelError, ValueError: one of `lora_modules` cannot be had.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model_name: str,
        *,
        stacked: bool,
        lock: EngineLock,
        put: Callable[[Any, int], None],
        live_places: Callable[[], Iterable[int]],
    ) -> None:
        self._config = config
        self._model_config = model_config
        self._model_name = model_name
        self._stacked = stacked
        self._lock = lock
        self._put = put
        self._live_places = live_places
        self._loaded: dict[str, Adapter] = {}  # replaced when it changes: reading it takes no lock
        self._loading: dict[str, Adapter] = {}
        self._pending: deque[tuple[Adapter, Any, Future[Adapter]]] = deque()
        self._num_loadings = 0
        for module in config.lora_modules:
            name, _, path = module.partition("=")
            self.load(name, path)

    @property
    def listed(self) -> tuple[Adapter, ...]:
        """Those that requests may name, in the order of their loading."""
        return tuple(self._loaded.values())

    @property
    def has_pending(self) -> bool:
        """Whether `place_pending` has something to do."""
        return bool(self._pending)

    def find(self, name: str) -> Adapter | None:
        """The loaded adapter of a name; None for "".

        Raises:
          RejectedError: none of that name is loaded.
        """
        if not name:
            return None
        adapter = self._loaded.get(name)
        if adapter is None:
            message = f"the LoRA adapter {name[:MAX_NAME]!r} is not loaded"
            raise RejectedError(Rejection("unknown_adapter", message))
        return adapter

    def refusal(self, requests: Iterable[Request]) -> Rejection | None:
        """Why they cannot be queued now: the adapter of one was unloaded since it was made. Under the engine's lock."""
        named = [request.adapter for request in requests if request.adapter]
        if not named or {adapter.number for adapter in self._loaded.values()}.issuperset(named):
            return None
        return Rejection("unknown_adapter", "the request's LoRA adapter was unloaded")

    def load(self, name: str, path: str) -> Future[Adapter]:
        """Reads an adapter and has it placed at the next `place_pending`; requests may name it when that is done.

        Raises:
          ValueError: LoRA is off, the name is bad or taken, or every place is.
          RejectedError: a place is held by requests of an adapter that was unloaded.
          EngineStuckError: the engine's lock is held for ever.
          AdapterNotFoundError, CheckpointError, UnsupportedModelError: it cannot be read.
        """
        adapter = self._reserve(name, path)
        try:
            layers = read_lora(
                path,
                self._model_config,
                dtype=self._config.dtype,
                rank=stored_rank(self._config.max_lora_rank),
                max_lora_rank=self._config.max_lora_rank,
                stacked=self._stacked,
            )
        except BaseException:
            with self._lock:
                del self._loading[name]
            raise
        placed: Future[Adapter] = Future()
        self._pending.append((adapter, layers, placed))
        return placed

    def unload(self, name: str) -> None:
        """Refuses requests for an adapter from now on; those that are live go on.

        Raises:
          AdapterNotFoundError: none of that name is loaded.
          EngineStuckError: the engine's lock is held for ever.
        """
        with self._lock.soon():
            if name not in self._loaded:
                raise AdapterNotFoundError(f"the LoRA adapter {name[:MAX_NAME]!r} cannot be found")
            self._loaded = {other: adapter for other, adapter in self._loaded.items() if other != name}

    def place_pending(self) -> bool:
        """Puts the adapters that were read in their places; on the stepping thread, between steps.

        Returns:
          Whether there was one.
        """
        found = False
        while self._pending:
            adapter, layers, placed = self._pending.popleft()
            try:
                self._put(layers, adapter.place)
            except BaseException as error:
                placed.set_exception(error)
                raise
            with self._lock:
                del self._loading[adapter.name]
                self._loaded = {**self._loaded, adapter.name: adapter}
            placed.set_result(adapter)
            found = True
        return found

    def _reserve(self, name: str, path: str) -> Adapter:
        if not self._config.enable_lora:
            raise ValueError("LoRA adapters are off; start with enable_lora")
        if not 0 < len(name) <= MAX_NAME or not path:
            raise ValueError(f"lora_name must have 1 to {MAX_NAME} characters, and lora_path must be given")
        if name == self._model_name:
            raise ValueError(f"lora_name is {name!r}, which is the model's own name; use another")
        with self._lock.soon():
            if name in self._loaded or name in self._loading:
                raise ValueError(f"the lora adapter {name!r} has already been loaded; unload it first")
            taken = {adapter.place for adapter in (*self._loaded.values(), *self._loading.values())}
            limit = self._config.max_loras
            if len(taken) == limit:
                raise ValueError(f"{limit} LoRA adapters are loaded, the limit (max_loras); unload one")
            taken.update(self._live_places())
            place = next((place for place in range(1, limit + 1) if place not in taken), None)
            if place is None:
                message = (
                    "the place of an adapter that was unloaded is held by requests that still run; try again later"
                )
                raise RejectedError(Rejection("adapter_leaving", message, retry_after_s=1.0))
            self._num_loadings += 1
            self._loading[name] = adapter = Adapter(name, path, self._num_loadings, place, int(time.time()))
        return adapter

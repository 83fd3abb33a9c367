"""ModelRunner: owns the device side of one engine and runs plans on it.

`prepare` packs a plan on the host. `dispatch` sends its two blobs and starts the first of the step's two programs,
which computes logits; `sample` starts the second, with the masks of grammars and words where there are any. `collect`
waits for the sampled tokens; until then the host is free, and may dispatch the next step: programs run in the order
in which they were started. Pool and slot state never leave the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.core import Request
from jaxserve.faults import failpoint, failpoints_active
from jaxserve.models import ModelConfig, stored_rank, zero_lora
from jaxserve.runtime.device_errors import is_sound
from jaxserve.runtime.engine_shapes import EngineShapes
from jaxserve.runtime.kv_pool import SWAP_BLOCK, KVPool, PoolLayout
from jaxserve.runtime.memory_plan import MemoryPlan, check_pages_fit, free_bytes, num_host_pages
from jaxserve.runtime.page_swapper import PageSwapper
from jaxserve.runtime.page_transfers import PageTransfers
from jaxserve.runtime.programs import ProgramTable, Progress, mask_words
from jaxserve.runtime.slot_state import SlotRow, SlotState, join_state, slot_row, split_state
from jaxserve.runtime.step_faults import StepFaults
from jaxserve.runtime.step_handles import PreparedStep, StepHandle, StepOutput, output_of
from jaxserve.runtime.steps import StepOutputs
from jaxserve.scheduler.plan import StepPlan
from jaxserve.tables import Bucket, TableBuilder


class ModelRunner:
    """Device side of an engine: weights, KV pool, slot state and compiled programs.

    Args:
      model_config: the model.
      params: weights on `mesh`; shapes with shardings (`jax.ShapeDtypeStruct`) do for the memory plan.
      config: engine settings.
      max_model_len: resolved context length.
      mesh: devices.
      free: bytes of a device that may be planned with; None: as `free_bytes` tells.

    Attributes:
      newest: a result of the program started last: not ready means that the device is busy.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        params: Any,
        config: EngineConfig,
        max_model_len: int,
        mesh: Mesh,
        free: int | None = None,
    ) -> None:
        shapes = EngineShapes.of(model_config, params, config, max_model_len, mesh)
        self._model_config = shapes.model_config
        self._params = params
        self._config = config
        self._mesh = mesh
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._kv = shapes.kv
        self._programs = ProgramTable(
            self._kv,
            params,
            max_num_seqs=config.max_num_seqs,
            dtype=config.dtype,
            max_decode_steps=config.max_decode_steps,
        )
        self.buckets = shapes.buckets
        self.memory_plan = self._plan_memory(shapes, free)
        self.scheduler_config: SchedulerConfig = config.scheduler_config(
            max_model_len=max_model_len,
            num_pages=self.memory_plan.num_pages,
            num_host_pages=self.memory_plan.num_host_pages,
            windows=self._kv.groups.windows,
        )
        self._builder = TableBuilder(self.scheduler_config, self.buckets, adapters="adapters" in params)
        self._swapper: PageSwapper | None = None
        self._transfers: PageTransfers | None = None
        self._faults: StepFaults | None = None
        self._pool: Any = None
        self._state: Any = None
        self._make_pool: Callable[[], KVPool] | None = None
        self._make_state: Callable[[], SlotState] | None = None
        # What a step without masks is given, by number of rows: nobody reads it.
        self._no_masks: dict[int, jax.Array] = {}
        # The last step's float32 blob, likewise, and on the device once a second step had it: most have the last one's.
        self._floats: dict[int, tuple[np.ndarray, jax.Array | None]] = {}
        self.newest: jax.Array | None = None

    @property
    def params(self) -> Any:
        """The weights as the programs take them."""
        return self._params

    @property
    def kv_layout(self) -> PoolLayout:
        """Of the KV pool."""
        return self._kv

    @property
    def page_bytes(self) -> int:
        """Of a page in all layers of a group, K and V and scales, on all devices together."""
        return self._kv.page_bytes

    def warm_up(self, progress: Progress | None = None) -> None:
        """Allocates the pool, compiles every bucket and runs each once on padding."""
        config = self._config
        buckets = self.buckets.all()
        self._programs.warm_up(buckets, self.memory_plan.num_pages, progress)
        self._make_pool = self._kv.compile_make(self.memory_plan.num_pages)
        self._make_state = self._programs.compile_make_state()
        self._pool, self._state = self._make_pool(), self._make_state()
        if failpoints_active():
            self._faults = StepFaults(self._kv, self.memory_plan.num_pages, self._programs, self._builder)
        words = mask_words(self._model_config.vocab_size)
        self._no_masks = {
            rows: self._programs.put(np.zeros((rows, words), np.uint32))
            for rows in {bucket.sample_rows for bucket in buckets}
        }
        if config.swaps or config.moves_kv:
            self._programs.compile_swaps(self.memory_plan.num_pages)
        if config.moves_kv:
            self._transfers = PageTransfers(self._kv.abstract(SWAP_BLOCK), self._programs)
            self._pool = self._transfers.warm_up(self._pool)
        if config.swaps:
            self._swapper = PageSwapper(self._kv, self.memory_plan.num_host_pages, self._programs)
            self._pool = self._swapper.warm_up(self._pool)
        for bucket in buckets:
            tables = self._builder.empty(bucket)
            handle = self._start(StepPlan(0), bucket, tables.ints, tables.floats)
            self.sample(handle)
            jax.block_until_ready(handle.outputs)
            if config.max_decode_steps > 1 and not bucket.prefill_tokens:
                tables = self._builder.empty(bucket)
                limits = self._builder.empty_limits(bucket)
                handle = self._start_loop(StepPlan(0), bucket, tables.ints, tables.floats, limits)
                jax.block_until_ready(handle.outputs)
        if "adapters" in self._params:
            stacked, rank = not isinstance(self._params["layers"], list), stored_rank(config.max_lora_rank)
            nothing = zero_lora(self._model_config, config.dtype, rank, stacked=stacked)
            self._programs.compile_place_adapter(nothing)
            self.place_adapter(nothing, 1)
        request = Request("warm-up", (0,))
        self._place(self.scheduler_config.max_num_seqs, slot_row(request, [], -1, self._model_config.vocab_size))

    def place_adapter(self, layers: Any, place: int) -> None:
        """Puts an adapter in a place: steps dispatched from now on have it. On the thread that dispatches them.

        Args:
          layers: host arrays, as `models.place_lora` takes them.
          place: that no step in the device's stream or after it uses.
        """
        adapters = self._params["adapters"]
        placed = self._programs.place_adapter(adapters["layers"], layers, np.asarray(place, np.int32))
        self._params = self._params | {"adapters": adapters | {"layers": placed}}

    def fill_pool(self, value: float) -> None:
        """Overwrites every page with `value`: NaN shows a read of what nobody wrote. For tests; compiles.

        An int8 pool, which has no NaN, has its scales overwritten.
        """

        def fill(x: jax.Array) -> jax.Array:
            return jax.numpy.full_like(x, value) if jax.numpy.issubdtype(x.dtype, jax.numpy.floating) else x

        self._pool = jax.jit(lambda pool: jax.tree.map(fill, pool), donate_argnums=0)(self._pool)

    def prompt_logits(self, token_ids: Sequence[int]) -> Iterator[np.ndarray]:
        """Logits of every position of a prompt, computed chunk by chunk as a prefill is: float32[tokens, V] each.

        For measurements, while nothing is live: it compiles, and overwrites pages.

        Raises:
          ValueError: the prompt has more tokens than a request may.
        """
        config = self.scheduler_config
        if len(token_ids) > config.max_model_len:
            raise ValueError(f"{len(token_ids)} tokens; max_model_len is {config.max_model_len}")
        usable = config.num_pages - 1
        if usable < config.most_pages_per_seq:
            raise ValueError(f"{usable} pages; one prompt may need {config.most_pages_per_seq}: raise num_pages")
        bucket = Bucket(0, min(config.prefill_chunk, config.max_num_batched_tokens), 1, config.pages_per_seq)
        program = self._programs.compile_prompt_logits(bucket, config.num_pages)
        layout = self._builder.layout(bucket)
        for start in range(0, len(token_ids), bucket.prefill_tokens):
            chunk = token_ids[start : start + bucket.prefill_tokens]
            ints = self._builder.empty(bucket).ints
            fields = layout.unpack_rows(ints)
            fields["prefill_tokens"][: len(chunk)] = chunk
            fields["prefill_position"][: len(chunk)] = range(start, start + len(chunk))
            fields["prefill_starts"][1:] = len(chunk)
            fields["prefill_context"][0] = start + len(chunk)
            first = 1
            for pages, window in zip(fields["prefill_pages"], config.windows, strict=True):
                # Pages that a chunk does not see any more are written again.
                count = min(config.pages_per_seq, config.pages_spanned(bucket.prefill_tokens, window))
                pages[0] = [first + index % count for index in range(config.pages_per_seq)]
                first += count
            self._pool, logits = program(self._params, self._pool, self._state.last_token, ints)
            yield np.asarray(logits)[: len(chunk)]

    def prepare(
        self,
        plan: StepPlan,
        request_of: Callable[[str], Request],
        outputs_of: Callable[[str], list[int]],
    ) -> PreparedStep:
        """Packs a plan; host work only.

        Args:
          plan: not empty.
          request_of, outputs_of: the live request of an id, and the tokens it has sampled so far.

        Raises:
          MissingBucketError: no compiled shape holds the plan.
        """
        rows = []
        for placement in plan.placements:
            request = request_of(placement.request_id)
            if request.params.edits_logits or placement.last_token_id >= 0:
                outputs = outputs_of(placement.request_id)
                row = slot_row(request, outputs, placement.last_token_id, self._model_config.vocab_size)
                rows.append((placement.slot, row))
        moves = None
        if self._transfers and (plan.placements or plan.exports):
            moves = self._transfers.prepare(plan, request_of)
        return PreparedStep(plan, rows, self._builder.build(plan, request_of), moves)

    def dispatch(self, prepared: PreparedStep) -> StepHandle:
        """Sends the tables and starts to compute the step's logits; does not wait for them.

        `sample` comes before the next call: a step feeds the tokens that the one before it sampled. A plan of several
        steps is sampled as it runs: its handle has its outputs.
        """
        plan, tables = prepared.plan, prepared.tables
        fault = self._faults and self._faults.strike("runner.dispatch", plan)
        if self._swapper and plan.swaps:
            self._pool = self._swapper.run(self._pool, plan.iteration, plan.swaps)
        moves = prepared.moves
        if self._transfers and moves:
            self._pool = self._transfers.run_imports(self._pool, moves)
        for slot, row in prepared.slot_rows:
            self._place(slot, row)
        # As they are: the call of a compiled program sends host arrays, in half the time that `device_put` takes.
        if tables.limits is not None:
            handle = self._start_loop(plan, tables.bucket, tables.ints, tables.floats, tables.limits)
        else:
            handle = self._start(plan, tables.bucket, tables.ints, tables.floats)
        if self._faults and fault:
            self._pool = self._faults.break_rows(self._pool, plan, fault)
        if self._transfers and moves and moves.exports:
            self._transfers.run_exports(self._pool, plan.iteration, moves)
        return handle

    def sample(self, handle: StepHandle, masks: np.ndarray | None = None) -> None:
        """Starts to sample a step's tokens; does not wait for them.

        Args:
          handle: of the step dispatched last.
          masks: uint32[N, ceil(V / 32)], see `sampler.sample`, for a plan with rows that one binds.
        """
        assert handle.forwarded is not None, f"plan {handle.plan.iteration} is sampled twice"
        if self._faults:
            self._faults.strike("runner.sample", handle.plan)
        (logits, sample_ints, prompt_scores), floats = handle.forwarded
        _, sampler = self._programs.get(handle.bucket)
        rows = handle.bucket.sample_rows
        put = self._no_masks[rows] if masks is None else self._programs.put(masks)
        sampled, edits = split_state(self._state)
        sampled, tokens, scores = sampler(sampled, edits, logits, sample_ints, self._sent(rows, floats), put)
        self._state = join_state(sampled, edits)
        tokens.copy_to_host_async()
        handle.outputs, handle.forwarded = StepOutputs(tokens, scores, prompt_scores), None
        self.newest = tokens

    def collect(self, handle: StepHandle) -> StepOutput:
        """Waits for a step's tokens: the one host sync of an iteration."""
        assert handle.outputs is not None, f"plan {handle.plan.iteration} is collected before it is sampled"
        if self._faults:
            self._faults.strike("runner.collect", handle.plan)
        sampled = np.asarray(handle.outputs.tokens)
        if self._swapper and handle.plan.swaps:
            self._swapper.settle(handle.plan.iteration)
        if self._transfers and handle.plan.exports:
            self._transfers.settle(handle.plan.iteration)
        return output_of(handle, sampled)

    def recover(self) -> bool:
        """Makes the device ready for new steps after one has failed; waits for what it still does.

        Every request that runs on is to be placed again. What was lost of pool and slot state is made anew, by programs
        that are compiled already.

        Returns:
          Whether the pool still holds what it held before the steps in flight.

        Raises:
          Exception: whatever keeps the device from working on.
        """
        failpoint("runner.recover")
        assert self._make_pool is not None and self._make_state is not None, "recover before warm_up"
        if self._swapper:
            self._swapper.reset()
        if self._transfers:
            self._transfers.reset()
        self._builder.reset()
        self._floats, self.newest = {}, None
        keeps_pool, keeps_state = is_sound(self._pool), is_sound(self._state)
        if not keeps_pool:
            self._pool = None  # before the next one: there is no room for two
            self._pool = self._make_pool()
        if not keeps_state:
            self._state = self._make_state()
        jax.block_until_ready((self._pool, self._state))
        return keeps_pool

    def _sent(self, rows: int, floats: np.ndarray) -> np.ndarray | jax.Array:
        """A step's float32 blob as its sampler is given it: what differs from the last one's is sent by the call."""
        last, on_device = self._floats.get(rows, (None, None))
        if last is not floats:
            self._floats[rows] = floats, None
            return floats
        if on_device is None:
            on_device = self._programs.put(floats)
            self._floats[rows] = floats, on_device
        return on_device

    def _start(self, plan: StepPlan, bucket: Bucket, ints: np.ndarray, floats: np.ndarray) -> StepHandle:
        step, _ = self._programs.get(bucket)
        self._pool, forwarded = step(self._params, self._pool, self._state.last_token, ints)
        self.newest = forwarded.logits
        return StepHandle(plan, bucket, (forwarded, floats))

    def _start_loop(
        self, plan: StepPlan, bucket: Bucket, ints: np.ndarray, floats: np.ndarray, limits: np.ndarray
    ) -> StepHandle:
        loop = self._programs.loop(bucket)
        self._pool, self._state, tokens = loop(self._params, self._pool, self._state, ints, floats, limits)
        tokens.copy_to_host_async()
        self.newest = tokens
        return StepHandle(plan, bucket, None, StepOutputs(tokens, None, None))

    def _place(self, slot: int, row: SlotRow) -> None:
        where, row = self._programs.put((np.asarray(slot, np.int32), row))
        self._state = self._programs.place(self._state, where, row)

    def _plan_memory(self, shapes: EngineShapes, free: int | None) -> MemoryPlan:
        config, device = self._config, self._mesh.devices.flat[0]
        free = free_bytes(self._params, self._mesh) if free is None else free
        allowed = int(free * config.memory_fraction)
        host_pages = 0
        if config.swaps:
            host_pages = num_host_pages(config.swap_space, self.page_bytes, shapes.limits)
            if device.platform == "cpu":
                allowed -= host_pages * self.page_bytes // self._mesh.size
        if config.num_pages is not None:
            # Before anything is compiled for a pool that cannot be.
            page_bytes = self._kv.bytes_on_a_device(1)
            check_pages_fit(config.num_pages, page_bytes, allowed - shapes.weights_bytes, allowed)
        step_bytes = self._programs.workspace_bytes(
            self.buckets.all()[-1], shapes.guess_pages(allowed), shapes.limits.max_steps_ahead
        )
        return shapes.memory_plan(allowed, step_bytes, host_pages)

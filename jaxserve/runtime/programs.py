"""ProgramTable: every compiled program of an engine: forward steps by bucket, samplers by number of rows, decode loops.

Compiling happens here, before the first request, and nowhere else: `get` on a bucket that was not
compiled raises. Warm-up also checks what a silent mistake would cost: that the pool was aliased, and
that no step keeps a second copy of it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.core import JaxserveError, MissingBucketError
from jaxserve.models import partition_spec, place_lora, put_everywhere
from jaxserve.runtime.decode_loop import make_decode_loop
from jaxserve.runtime.kv_pool import SWAP_BLOCK, KVPool, PoolLayout, gather_pages, scatter_pages
from jaxserve.runtime.slot_state import SlotRow, SlotState, abstract_slot_state, place_row, split_state
from jaxserve.runtime.steps import Forwarded, make_prompt_logits, make_step, sample_step
from jaxserve.tables import Bucket, TableLayout, num_programs
from jaxserve.tables.layout import LIMIT_COLUMNS, SAMPLE_INTS, SAMPLING_FLOATS

COMPILE_THREADS = max(2, min(8, os.cpu_count() or 2))
"""Programs compiled at once: tracing holds the interpreter, XLA does not; each takes memory while it is compiled."""

Progress = Callable[[int, int, str], None]
"""Called with done, total and what was done last."""


class ProgramTable:
    """Compiles and holds the step programs, the samplers and the slot-placement program.

    Args:
      kv: model, devices and KV pool.
      params: weights on their devices; only shapes and shardings are used.
      max_num_seqs: slots.
      dtype: of weights and activations.
      max_decode_steps: of one dispatch; above 1, buckets of decode rows alone have a decode loop too.
    """

    def __init__(
        self, kv: PoolLayout, params: Any, *, max_num_seqs: int, dtype: str, max_decode_steps: int = 1
    ) -> None:
        self._kv = kv
        self._max_decode_steps = max_decode_steps
        self._dtype = dtype
        self._replicated = NamedSharding(kv.mesh, PartitionSpec())
        self._params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
        self._state = self._on_mesh(abstract_slot_state(max_num_seqs, kv.config.vocab_size))
        # As the output layer leaves them: every device has its part of the vocabulary.
        self._logits_sharding = NamedSharding(kv.mesh, partition_spec(kv.config, (None, "vocab"), kv.mesh))
        self._steps: dict[Bucket, Any] = {}
        self._samplers: dict[int, Any] = {}
        self._loops: dict[Bucket, Any] = {}
        self._measured: dict[tuple[Bucket, int], Any] = {}
        self._measured_loops: dict[tuple[Bucket, int], Any] = {}
        self._place: Any = None
        self._place_adapter: Any = None
        self._gather: Any = None
        self._scatter: Any = None

    def get(self, bucket: Bucket) -> tuple[Any, Any]:
        """The compiled step of `bucket`, and the sampler of its rows.

        Raises:
          MissingBucketError: it was not compiled at warm-up.
        """
        program = self._steps.get(bucket)
        if program is None:
            raise MissingBucketError(f"bucket {bucket.name} was not compiled at warm-up")
        return program, self._samplers[bucket.sample_rows]

    def loop(self, bucket: Bucket) -> Any:
        """The compiled decode loop of `bucket`.

        Raises:
          MissingBucketError: it was not compiled at warm-up.
        """
        if bucket not in self._loops:
            raise MissingBucketError(f"the decode loop of bucket {bucket.name} was not compiled at warm-up")
        return self._loops[bucket]

    @property
    def place(self) -> Any:
        """The compiled `place_row`."""
        return self._place

    @property
    def place_adapter(self) -> Any:
        """The compiled `place_lora`, which consumes the adapters it is given."""
        return self._place_adapter

    def compile_place_adapter(self, new: Any) -> None:
        """Compiles the program that puts an adapter of the shapes of `new`, host arrays, in a place."""
        layers = self._params["adapters"]["layers"]
        shapes = self._on_mesh((new, jax.ShapeDtypeStruct((), jnp.int32)))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, layers)
        jitted = jax.jit(place_lora, donate_argnums=0, out_shardings=shardings)
        self._place_adapter = jitted.lower(layers, *shapes).compile()

    @property
    def gather(self) -> Any:
        """The compiled `gather_pages`."""
        return self._gather

    @property
    def scatter(self) -> Any:
        """The compiled `scatter_pages`, which consumes the pool it is given."""
        return self._scatter

    def compile_swaps(self, num_pages: int) -> None:
        """Compiles the copies of `SWAP_BLOCK` pages between a pool of `num_pages` and the host.

        Raises:
          JaxserveError: pages would not be written in place.
        """
        pool, block = self._kv.abstract(num_pages), self._kv.abstract(SWAP_BLOCK)
        ids = self._on_mesh(jax.ShapeDtypeStruct((SWAP_BLOCK,), jnp.int32))
        self._gather = jax.jit(gather_pages, out_shardings=self._kv.sharding).lower(pool, ids).compile()
        scatter = jax.jit(scatter_pages, donate_argnums=0, out_shardings=self._kv.sharding)
        self._scatter = scatter.lower(pool, block, ids).compile()
        _check_in_place("the program that writes swapped pages", self._scatter, pool)

    def put_page_ids(self, pages: Sequence[int]) -> jax.Array:
        """Ids of at most `SWAP_BLOCK` pages, for `gather` and `scatter`; the rest is the null page."""
        ids = np.zeros(SWAP_BLOCK, np.int32)
        ids[: len(pages)] = pages
        return self.put(ids)

    def put(self, arrays: Any) -> Any:
        """Host arrays, or a tree of them, on every device."""
        return put_everywhere(arrays, self._replicated)

    def put_pages(self, pages: KVPool) -> KVPool:
        """Pages on the host, sent to the devices and sharded as the pool is."""
        return jax.device_put(pages, self._kv.sharding)

    def compile(self, bucket: Bucket, num_pages: int) -> Any:
        """Compiles the step of one bucket for a pool of `num_pages`.

        Raises:
          ValueError: the attention implementation lacks something that the model or the pool needs.
        """
        layout = self._layout(bucket)
        step = make_step(self._kv, layout)
        pool = self._kv.abstract(num_pages)
        ints = self._on_mesh(jax.ShapeDtypeStruct((layout.int_size,), jnp.int32))
        scores = self._replicated if bucket.prefill_tokens else None
        forwarded = Forwarded(self._logits_sharding, self._replicated, scores)
        jitted = jax.jit(step, donate_argnums=1, out_shardings=(self._kv.sharding, forwarded))
        return self._compile(jitted, self._params, pool, self._state.last_token, ints)

    def compile_loop(self, bucket: Bucket, num_pages: int) -> Any:
        """Compiles the decode loop of a bucket of decode rows alone, for a pool of `num_pages`."""
        layout = self._layout(bucket)
        loop = make_decode_loop(self._kv, layout, self._max_decode_steps, self._logits_sharding)
        blobs = self._on_mesh(
            (
                jax.ShapeDtypeStruct((layout.int_size,), jnp.int32),
                jax.ShapeDtypeStruct((layout.float_size,), jnp.float32),
                jax.ShapeDtypeStruct((bucket.decode_rows, LIMIT_COLUMNS), jnp.int32),
            )
        )
        state_sharding = jax.tree.map(lambda _: self._replicated, self._state)
        out_shardings = (self._kv.sharding, state_sharding, self._replicated)
        jitted = jax.jit(loop, donate_argnums=(1, 2), out_shardings=out_shardings)
        return self._compile(jitted, self._params, self._kv.abstract(num_pages), self._state, *blobs)

    def compile_prompt_logits(self, bucket: Bucket, num_pages: int) -> Any:
        """Compiles `make_prompt_logits` of a bucket of prompt tokens alone; for measurements."""
        layout = self._layout(bucket)
        ints = self._on_mesh(jax.ShapeDtypeStruct((layout.int_size,), jnp.int32))
        out_shardings = (self._kv.sharding, self._logits_sharding)
        jitted = jax.jit(make_prompt_logits(self._kv, layout), donate_argnums=1, out_shardings=out_shardings)
        return self._compile(jitted, self._params, self._kv.abstract(num_pages), self._state.last_token, ints)

    def _layout(self, bucket: Bucket) -> TableLayout:
        return TableLayout(bucket, "adapters" in self._params, len(self._kv.groups.windows))

    def _compile(self, jitted: Any, *arguments: Any) -> Any:
        with jax.default_matmul_precision("highest" if self._dtype == "float32" else "default"):
            try:
                return jitted.lower(*arguments).compile()
            except NotImplementedError as error:
                raise ValueError(f"attention on this device: {error}") from error

    def compile_sampler(self, rows: int) -> Any:
        """Compiles the sampler of `rows` sample rows."""
        (sampled, edits), vocab_size = split_state(self._state), self._kv.config.vocab_size
        logits = jax.ShapeDtypeStruct((rows, vocab_size), jnp.float32, sharding=self._logits_sharding)
        others = self._on_mesh(
            (
                jax.ShapeDtypeStruct((len(SAMPLE_INTS), rows), jnp.int32),
                jax.ShapeDtypeStruct((len(SAMPLING_FLOATS) * rows,), jnp.float32),
                jax.ShapeDtypeStruct((rows, mask_words(vocab_size)), jnp.uint32),
            )
        )
        jitted = jax.jit(
            sample_step,
            donate_argnums=0,
            out_shardings=(jax.tree.map(lambda _: self._replicated, sampled), self._replicated, self._replicated),
        )
        return jitted.lower(sampled, edits, logits, *others).compile()

    def workspace_bytes(self, bucket: Bucket, num_pages: int, max_steps_ahead: int = 0) -> int:
        """Temporary and output bytes of a bucket's step, or of its sampler or decode loop if one of them needs more.

        Steps in flight behind it add what they leave, not temporary bytes: programs run one after the other.

        They do not depend on the pool's size, so a guess at `num_pages` does; if it is right, warm-up
        takes the programs compiled here.
        """
        program = self.compile(bucket, num_pages)
        self._measured = {(bucket, num_pages): program}
        return self.workspace_of(program, bucket, num_pages, max_steps_ahead)

    def workspace_of(self, program: Any, bucket: Bucket, num_pages: int, max_steps_ahead: int = 0) -> int:
        """`workspace_bytes` of a bucket whose step is compiled already."""
        sampler = self.compile_sampler(bucket.sample_rows)
        self._samplers = {bucket.sample_rows: sampler}
        shape = (bucket.sample_rows, self._kv.config.vocab_size)
        logits_bytes = 4 * math.prod(self._logits_sharding.shard_shape(shape))
        left = _output_bytes(program) + _output_bytes(sampler)
        needed = max(_workspace(program), logits_bytes + _workspace(sampler))
        if self._max_decode_steps > 1 and bucket.decode_rows:
            decode = Bucket(bucket.decode_rows, 0, 0, bucket.table_width)
            loop = self._measured_loops[decode, num_pages] = self.compile_loop(decode, num_pages)
            needed = max(needed, _workspace(loop))
        return needed + max_steps_ahead * left

    def warm_up(self, buckets: list[Bucket], num_pages: int, progress: Progress | None = None) -> None:
        """Compiles every bucket, their samplers and the placement program; several at a time, largest first.

        Raises:
          JaxserveError: a program would not update the pool in place.
        """
        rows = sorted({bucket.sample_rows for bucket in buckets}.difference(self._samplers), reverse=True)
        loops = [b for b in reversed(buckets) if not b.prefill_tokens and self._max_decode_steps > 1]
        total = num_programs(buckets, self._max_decode_steps)
        before = total - len(buckets) - len(rows) - len(loops)  # slot placement, and a sampler that was measured
        pool = self._kv.abstract(num_pages)
        self._place = (
            jax.jit(place_row, donate_argnums=0, out_shardings=jax.tree.map(lambda _: self._replicated, self._state))
            .lower(self._state, self._on_mesh(jax.ShapeDtypeStruct((), jnp.int32)), self._abstract_row())
            .compile()
        )
        if progress:
            progress(before, total, "slot placement")
        with ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="compile") as threads:
            waiting: dict[Future[Any], Bucket | int | tuple[Bucket]] = {
                threads.submit(self._measured_or_compiled, b, num_pages): b for b in reversed(buckets)
            }
            waiting |= {threads.submit(self._measured_or_compiled_loop, b, num_pages): (b,) for b in loops}
            waiting |= {threads.submit(self.compile_sampler, count): count for count in rows}
            try:
                for done, future in enumerate(as_completed(waiting), start=before + 1):
                    name = self._keep(waiting[future], future.result(), pool)
                    if progress:
                        progress(done, total, name)
            finally:  # after an error, what has not begun is not waited for
                threads.shutdown(wait=False, cancel_futures=True)
        self._measured, self._measured_loops = {}, {}

    def _keep(self, what: Bucket | int | tuple[Bucket], program: Any, pool: Any) -> str:
        """Takes in a compiled step, sampler (by its rows) or decode loop (a tuple); what it is called."""
        if isinstance(what, int):
            self._samplers[what] = program
            return f"sampler of {what} rows"
        if isinstance(what, tuple):
            name = f"decode loop of {what[0].name}"
            _check_in_place(f"the {name}", program, pool)
            self._loops[what[0]] = program
            return name
        _check_in_place(f"the step of bucket {what.name}", program, pool)
        self._steps[what] = program
        return what.name

    def _measured_or_compiled_loop(self, bucket: Bucket, num_pages: int) -> Any:
        return self._measured_loops.get((bucket, num_pages)) or self.compile_loop(bucket, num_pages)

    def _measured_or_compiled(self, bucket: Bucket, num_pages: int) -> Any:
        return self._measured.get((bucket, num_pages)) or self.compile(bucket, num_pages)

    def _abstract_row(self) -> SlotRow:
        return SlotRow(
            *(jax.ShapeDtypeStruct(array.shape[1:], array.dtype, sharding=self._replicated) for array in self._state)
        )

    def _on_mesh(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._replicated), tree)

    def compile_make_state(self) -> Callable[[], SlotState]:
        """What makes a zeroed slot state."""
        shapes = self._state
        program: Callable[[], SlotState] = (
            jax.jit(
                lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
                out_shardings=jax.tree.map(lambda _: self._replicated, shapes),
            )
            .lower()
            .compile()
        )
        return program


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask over the vocabulary."""
    return -(-vocab_size // 32)


def _workspace(program: Any) -> int:
    return int(program.memory_analysis().temp_size_in_bytes) + _output_bytes(program)


def _output_bytes(program: Any) -> int:
    analysis = program.memory_analysis()
    # Donated outputs alias arguments; only what is new counts.
    return int(analysis.output_size_in_bytes - analysis.alias_size_in_bytes)


def _check_in_place(name: str, program: Any, pool: KVPool) -> None:
    """Raises JaxserveError if a program returns another pool than it was given, or copies it on its way."""
    analysis = program.memory_analysis()
    local_shapes = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(pool)]
    sizes = zip(local_shapes, jax.tree.leaves(pool), strict=True)
    pool_bytes = sum(math.prod(shape) * x.dtype.itemsize for shape, x in sizes)
    if analysis.alias_size_in_bytes < pool_bytes:
        raise JaxserveError(
            f"{name} aliases {analysis.alias_size_in_bytes} bytes; the KV pool has"
            f" {pool_bytes}: it would be copied every time"
        )
    # A copy of the pool is temporary memory of its size; the text, which is long, is read only then.
    if analysis.temp_size_in_bytes >= pool_bytes:
        copies = _copies(program.as_text(), {pool.pages.shape, local_shapes[0]})
        if copies:
            raise JaxserveError(f"{name} copies the KV pool of {pool_bytes} bytes every time: {', '.join(copies)}")


_COPY = re.compile(r"= \(?(\w+\[([\d,]+)\])[^ ]* (copy|copy-start|all-gather|all-gather-start|transpose)\(")
"""An instruction of compiled HLO that makes a new array of its input's numbers: type, shape, opcode."""


def _copies(hlo: str, shapes: set[tuple[int, ...]]) -> list[str]:
    """Instructions of `_COPY` that yield a pool of one of `shapes`, also seen as pages or rows: `opcode type`."""
    views = {view for *rest, size, dim in shapes for view in ((*rest, size, dim), (math.prod(rest), size, dim))}
    views |= {(math.prod(shape[:-1]), shape[-1]) for shape in shapes}
    return [
        f"{opcode} {array}"
        for array, dims, opcode in _COPY.findall(hlo)
        if tuple(int(size) for size in dims.split(",")) in views
    ]

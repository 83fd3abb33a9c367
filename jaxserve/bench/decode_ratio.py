"""`bench decode_ratio`: what attention adds to a decode step.

Two programs are compiled, equal but for attention: one writes K and V and attends over the pages, the
other hands queries back and leaves the pool alone. They run in turns, so that a change in the machine's
speed meets both; the ratio is the median over pairs.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.flags import FlagValues

from jaxserve.bench.report import Column, report
from jaxserve.loading import LoadedModel, load_model, resolve_model
from jaxserve.models import AttentionOptions, forward, unembed
from jaxserve.runtime import make_mesh
from jaxserve.runtime.kv_pool import PoolLayout
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import choose_implementation, paged_attention

SLOTS, CONTEXT, PAGE_SIZE = 8, 256, 16
PAIRS = 100
"""Enough that one burst of other work on the machine does not move the median."""

COLUMNS = (
    Column("dtype", "dtype"),
    Column("slots", "slots", "d"),
    Column("context_tokens", "context", "d"),
    Column("step_ms", "step ms", ".1f"),
    Column("without_attention_ms", "without attention ms", ".1f"),
    Column("ratio", "ratio", ".2f"),
    Column("ratio_first_quartile", "1st quartile", ".2f"),
    Column("ratio_third_quartile", "3rd quartile", ".2f"),
)


def run(flags: FlagValues) -> None:
    """Measures every dtype and reports the ratios."""
    resolved = resolve_model(flags.model)
    mesh = make_mesh(1)
    results = [measure(load_model(resolved, dtype, mesh=mesh), dtype, mesh) for dtype in flags.dtypes]
    report("decode_ratio", {"model": flags.model, "pairs": PAIRS}, results, COLUMNS, flags.output)


def measure(loaded: LoadedModel, dtype: str, mesh: Any) -> dict[str, Any]:
    """Times both programs at `SLOTS` rows whose contexts hold `CONTEXT` tokens."""
    width = CONTEXT // PAGE_SIZE
    latent = loaded.config.value_dim is not None
    implementation = choose_implementation("auto", mesh.devices.flat[0].platform, latent=latent)
    pool = PoolLayout(loaded.config, mesh, PAGE_SIZE, dtype, implementation).make(SLOTS * width + 1).pages
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, loaded.config.vocab_size, SLOTS), jnp.int32)
    page_table = jnp.arange(1, SLOTS * width + 1, dtype=jnp.int32).reshape(SLOTS, width)
    full, bare = (jax.jit(_step(loaded, attends), donate_argnums=1) for attends in (True, False))
    pairs = []
    for _ in range(PAIRS + 1):
        times = []
        for program in (full, bare):
            began = time.perf_counter()
            pool, tokens = program(loaded.params, pool, tokens, page_table)
            jax.block_until_ready((pool, tokens))
            times.append(time.perf_counter() - began)
        pairs.append(times)
    measured = pairs[1:]  # the first pair compiles
    first, ratio, third = statistics.quantiles((pair[0] / pair[1] for pair in measured), n=4)
    return {
        "dtype": dtype,
        "slots": SLOTS,
        "context_tokens": CONTEXT,
        "step_ms": 1e3 * statistics.median(pair[0] for pair in measured),
        "without_attention_ms": 1e3 * statistics.median(pair[1] for pair in measured),
        "ratio": ratio,
        "ratio_first_quartile": first,
        "ratio_third_quartile": third,
    }


def _step(loaded: LoadedModel, attends: bool) -> Any:
    """`step(params, pool, tokens, page_table) -> (pool, tokens)`: the last token of every row's context."""

    def step(params: Any, pool: jax.Array, tokens: jax.Array, page_table: jax.Array) -> tuple[jax.Array, jax.Array]:
        positions = jnp.full(SLOTS, CONTEXT - 1, jnp.int32)
        offsets = positions % PAGE_SIZE

        def attend(
            layer: Any, q: jax.Array, k: jax.Array, v: jax.Array | None, cache: jax.Array, options: AttentionOptions
        ) -> tuple[jax.Array, jax.Array]:
            if not attends:
                return q[..., : options.value_dim], cache
            cache = write_kv(cache, layer, k, v, page_table[:, -1], offsets, value_dim=options.value_dim)
            out = paged_attention(q, cache, layer, page_table, positions + 1, **options._asdict())
            return out, cache

        hidden, pool = forward(loaded.config, params, tokens, positions, attend, pool)
        return pool, jnp.argmax(unembed(loaded.config, params, hidden), axis=-1).astype(jnp.int32)

    return step

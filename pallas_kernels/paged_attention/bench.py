"""Times paged attention on this machine's device: microseconds, GB/s, TFLOP/s, and shares of what it can do.

Decode over batch, context, heads, page size and dtype; prefill over chunk and context. Beside the chosen
implementation stands what else computes the same: `xla` gathers pages and multiplies (the `cpu` implementation);
on GPU also jax's deprecated Triton kernel (decode) and, for whole prompts, cuDNN's attention on contiguous K and V,
which has no pages to follow. Their other layouts are made before the clock starts.

The shares are of a large copy and a large matrix product timed on the same device in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_write import quantise
from pallas_kernels.paged_attention.api import choose_implementation, load_implementation, paged_attention
from pallas_kernels.paged_attention.specs import Spec

LAYERS = 4
"""Of the pool: calls go from one layer to the next, so that K and V do not stay in a cache."""

_LLAMA_8B = dict(num_heads=32, num_kv_heads=8, head_dim=128)


@dataclass(frozen=True, slots=True)
class Figure:
    """One timed call.

    Attributes:
      shape, contender: what was timed.
      microseconds: median of a call.
      gbytes_per_s, tflops: of K and V, read once, and of matrix products over what queries see.
      copy_share, matmul_share: of the measured copy bandwidth and matrix product rate.
      note: why there is no figure.
    """

    shape: str
    contender: str
    microseconds: float = 0.0
    gbytes_per_s: float = 0.0
    tflops: float = 0.0
    copy_share: float = 0.0
    matmul_share: float = 0.0
    note: str = ""


def decode_spec(batch: int, context: int, page_size: int = 16, kv_dtype: str = "", **model: int) -> Spec:
    """A decode call of full rows."""
    width = -(-context // page_size)
    name = f"decode b{batch} c{context} s{page_size} h{model['num_heads']}/{model['num_kv_heads']} d{model['head_dim']}"
    return Spec(
        f"{name} {kv_dtype}".strip(),
        batch,
        batch,
        width,
        num_layers=LAYERS,
        num_pages=batch * width + 1,
        page_size=page_size,
        kv_dtype=kv_dtype,
        **model,
    )


def prefill_spec(rows: int, chunk: int, context: int, page_size: int = 16, **model: int) -> Spec:
    """The last `chunk` tokens of `rows` contexts."""
    spec = decode_spec(rows, context, page_size, **model)
    name = spec.name.replace("decode", "prefill") + f" q{chunk}"
    return replace(spec, name=name, num_tokens=rows * chunk, prefill=True)


def specs(small: bool) -> Iterator[Spec]:
    """Every shape that is timed; `small`: two that a CPU takes a moment for."""
    if small:
        tiny = dict(num_heads=4, num_kv_heads=2, head_dim=64)
        yield decode_spec(2, 64, **tiny)
        yield prefill_spec(2, 16, 64, **tiny)
        return
    for batch in (1, 4, 16, 64):
        for context in (512, 2048, 8192):
            yield decode_spec(batch, context, **_LLAMA_8B)
    for page_size in (32, 64, 128):
        yield decode_spec(16, 2048, page_size, **_LLAMA_8B)
    for kv_dtype in ("int8", "float8_e4m3fn"):
        yield decode_spec(16, 2048, 128, kv_dtype, **_LLAMA_8B)
    for heads, kv_heads, dim in ((32, 32, 128), (64, 8, 128), (16, 8, 256), (8, 1, 128)):
        yield decode_spec(16, 2048, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim)
    for rows, chunk, context in ((1, 512, 512), (1, 2048, 2048), (8, 256, 2048), (1, 512, 8192)):
        yield prefill_spec(rows, chunk, context, **_LLAMA_8B)


def make_inputs(spec: Spec, implementation: str) -> tuple[Any, ...]:
    """(q, pool, page_table, context_lens, query_starts, scales) of full rows in scattered pages."""
    rng = np.random.default_rng(0)
    q, pool, *_ = spec.abstract_args(implementation)
    keys = jax.random.split(jax.random.key(0), 2)
    stored = jax.random.normal(keys[0], pool.shape, jnp.bfloat16)
    stored, scales = quantise(stored, pool.dtype) if spec.kv_dtype else (stored.astype(pool.dtype), None)
    table = 1 + rng.permutation(spec.num_rows * spec.table_width).reshape(spec.num_rows, -1).astype(np.int32)
    starts = None
    if spec.prefill:
        starts = jnp.arange(spec.num_rows + 1, dtype=jnp.int32) * (spec.num_tokens // spec.num_rows)
    context = jnp.full(spec.num_rows, spec.table_width * spec.page_size, jnp.int32)
    return (jax.random.normal(keys[1], q.shape, q.dtype), stored, jnp.asarray(table), context, starts, scales)


def seconds_per_call(function: Callable[..., jax.Array], q: jax.Array, rest: Any, repeats: int) -> float:
    """Of `function(layer, q, rest)`, which returns an array like q: the median over five runs of a loop of calls.

    The loop is one program, so that dispatch is not timed; each call takes the result of the one before, so
    that none is left out, and another layer, so that K and V come from memory.
    """

    def loop(q: jax.Array, rest: Any) -> jax.Array:
        def body(_: jax.Array, q: jax.Array) -> jax.Array:
            for layer in range(LAYERS):
                q = function(layer, q, rest)
            return q

        return jax.lax.fori_loop(0, repeats, body, q)

    program = jax.jit(loop).lower(q, rest).compile()
    jax.block_until_ready(program(q, rest))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(program(q, rest))
        times.append((time.perf_counter() - began) / (repeats * LAYERS))
    return statistics.median(times)


def device_peaks(small: bool) -> tuple[float, float]:
    """Measured (bytes/s read plus written by a large copy, bfloat16 matrix products in 1/s)."""
    numbers, size, repeats = (1 << 20, 256, 2) if small else (1 << 30, 8192, 8)
    source = jnp.zeros(numbers, jnp.bfloat16)
    copied = seconds_per_call(lambda layer, x, one: x + one, source, jnp.bfloat16(1), repeats)
    matrix = jnp.full((size, size), 1 / size, jnp.bfloat16)
    product = seconds_per_call(lambda layer, a, b: a @ b, matrix, matrix, repeats)
    return 2 * 2 * numbers / copied, 2 * size**3 / product


def contenders(spec: Spec, implementation: str, inputs: tuple[Any, ...]) -> dict[str, tuple[Callable[..., Any], Any]]:
    """By name, a function of (layer, q, rest) and its `rest`; functions raise for what they lack."""

    def by(name: str) -> Callable[..., jax.Array]:
        def call(layer: int, q: jax.Array, rest: Any) -> jax.Array:
            pool, table, context, starts, scales = rest
            return paged_attention(q, pool, layer, table, context, starts, scales=scales, implementation=name)

        return call

    rest = inputs[1:]
    found = {implementation: (by(implementation), rest)}
    if implementation != "cpu":
        found["xla"] = (by("cpu"), rest)
    if jax.default_backend() == "gpu" and not spec.kv_dtype:
        pool, pages, context, *_ = rest
        if not spec.prefill:
            split = [[pool[layer, :, part].transpose(1, 0, 2, 3) for part in (0, 1)] for layer in range(LAYERS)]
            found["triton, deprecated"] = (_triton, (split, pages, context))
        elif spec.num_tokens == spec.num_rows * spec.table_width * spec.page_size:
            found["cudnn, contiguous"] = (_cudnn, [_contiguous(pool[layer, pages]) for layer in range(LAYERS)])
    return found


def _triton(layer: int, q: jax.Array, rest: Any) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import paged_attention as triton

    split, pages, context = rest  # its pools are [K, P, S, D], one layer's; it does not scale scores
    scaled = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    return triton.paged_attention(scaled, *split[layer], pages, context)


def _contiguous(pages: jax.Array) -> list[jax.Array]:
    """K and V [R, W * S, K, D] of pages [R, W, 2, K, S, D]."""
    parts = (pages[:, :, part].transpose(0, 1, 3, 2, 4) for part in (0, 1))
    return [x.reshape(x.shape[0], -1, *x.shape[3:]) for x in parts]


def _cudnn(layer: int, q: jax.Array, rest: Any) -> jax.Array:
    keys, values = rest[layer]
    rows = q.reshape(keys.shape[0], -1, *q.shape[1:])
    return jax.nn.dot_product_attention(rows, keys, values, is_causal=True, implementation="cudnn").reshape(q.shape)


def measure(spec: Spec, implementation: str, peaks: tuple[float, float], repeats: int) -> Iterator[Figure]:
    """A figure per contender."""
    inputs = make_inputs(spec, implementation)
    queries = spec.num_tokens // spec.num_rows
    seen = spec.num_tokens * (spec.table_width * spec.page_size - (queries - 1) / 2)  # (query, key) pairs
    flops = 4 * seen * spec.num_heads * spec.head_dim
    for name, (function, rest) in contenders(spec, implementation, inputs).items():
        try:
            seconds = seconds_per_call(function, inputs[0], rest, repeats)
        except Exception as error:  # a contender that cannot is a line that says so
            yield Figure(spec.name, name, note=f"{type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        yield Figure(
            spec.name,
            name,
            seconds * 1e6,
            spec.kv_bytes / seconds / 1e9,
            flops / seconds / 1e12,
            spec.kv_bytes / seconds / peaks[0],
            flops / seconds / peaks[1],
        )


def table(figures: list[Figure]) -> str:
    """The figures as aligned text."""
    lines = [f"{'shape':44} {'contender':20} {'us':>10} {'GB/s':>8} {'TFLOP/s':>8} {'copy':>6} {'matmul':>7}"]
    for f in figures:
        numbers = f"{f.microseconds:10.1f} {f.gbytes_per_s:8.1f} {f.tflops:8.2f}"
        numbers += f" {f.copy_share:6.1%} {f.matmul_share:7.1%}"
        lines.append(f"{f.shape:44} {f.contender:20} {f.note or numbers}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Times every shape; prints a table and writes JSON."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.paged_attention.bench", description=__doc__)
    parser.add_argument("--implementation", default="auto")
    parser.add_argument("--small", action="store_true", help="two small shapes: does it run?")
    parser.add_argument(
        "--repeats", type=int, default=16, help=f"times {LAYERS} calls in a timed run (default: %(default)s)"
    )
    parser.add_argument("--output", help="also write JSON here")
    options = parser.parse_args(argv)
    implementation = choose_implementation(options.implementation, jax.default_backend())
    load_implementation(implementation)
    peaks = device_peaks(options.small)
    figures: list[Figure] = []
    for spec in specs(options.small):
        figures += measure(spec, implementation, peaks, options.repeats)
        print(spec.name, file=sys.stderr)
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}: copy {peaks[0] / 1e9:.1f} GB/s, matmul {peaks[1] / 1e12:.2f} TFLOP/s")
    print(table(figures))
    if options.output:
        record = {"device": device, "jax": jax.__version__, "copy_bytes_per_s": peaks[0], "matmul_flops": peaks[1]}
        record["figures"] = [asdict(figure) for figure in figures]
        Path(options.output).write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

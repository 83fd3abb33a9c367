"""`bench machine`: this machine's limits, and how near the engine's decode step comes to the bound they set.

    bound = max(weight bytes / bandwidth, matrix FLOPs / peak) + K/V bytes / bandwidth

Weights are read once per step, as many bytes as the engine holds them in, K and V of every row's context once. FLOPs
are 2 per weight and row, the vocabulary's projection included. Bandwidth and peaks are the best of several tries, by
plain numpy reads in threads (on the device, a jitted sum) and by jitted square matrix products: of a type the faster of
XLA's and, on CPU, those with packed matrices. `matmuls` times the model's own products at the step's rows, one weight
after the other from memory, as a step does: what is left between the bound and the step that is not theirs is
attention, norms, sampling and the host.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.flags import FlagValues

from jaxserve import LLM, SamplingParams
from jaxserve.bench.report import Column, print_table, report
from jaxserve.core import Submission
from jaxserve.engine.output_processor import OutputDelta
from jaxserve.engine.stats import EngineStats
from jaxserve.models import ModelConfig, weights
from jaxserve.models.linear import matmul
from jaxserve.sim.roofline import LatentShape, ModelShape
from pallas_kernels.common import native
from pallas_kernels.matmul import QuantisedMatrix, ScaledMatrix, form_of, num_bytes, pack

SLOTS = (8, 32)
"""Where the flag does not say."""
READ_BYTES, TRIES = 1 << 30, 8
PEAK_SIZE = {"cpu": 2048}
"""Of the square products; elsewhere 8192."""
STEPS = 64
"""Decode steps that are timed."""
PAGE_SIZE, TOKEN_BUDGET = 16, 256

LIMITS = (Column("limit", "limit"), Column("value", "best", ".1f"), Column("unit", "unit"))
MATMULS = (
    Column("dtype", "dtype"),
    Column("form", "weights"),
    Column("rows", "rows", "d"),
    Column("shape", "product"),
    Column("count", "of them", "d"),
    Column("ms", "ms together", ".2f"),
    Column("gflop_per_s", "GFLOP/s", ".0f"),
    Column("gb_per_s", "GB/s of weights", ".1f"),
)
COLUMNS = (
    Column("dtype", "dtype"),
    Column("quantization", "quantization"),
    Column("weight_dtype", "weight dtype"),
    Column("slots", "slots", "d"),
    Column("context_tokens", "context", ".0f"),
    Column("weights_mb", "weights MB", ".0f"),
    Column("weights_ms", "weights ms", ".1f"),
    Column("flops_ms", "FLOPs ms", ".1f"),
    Column("kv_ms", "K/V ms", ".2f"),
    Column("bound_ms", "bound ms", ".1f"),
    Column("matmuls_ms", "matmuls ms", ".1f"),
    Column("step_ms", "step ms", ".1f"),
    Column("ratio_to_bound", "step / bound", ".2f"),
)


def run(flags: FlagValues) -> None:
    """Measures limits, products and steps, and reports all three."""
    slots = flags.slots if flags["slots"].present else SLOTS
    limits = measure_limits(flags.dtypes)
    print_table("machine: limits", limits, LIMITS)
    by_name = {each["limit"]: each["value"] for each in limits}
    bandwidth = max(value for name, value in by_name.items() if name.startswith("read"))
    peaks = {
        dtype: max(value for name, value in by_name.items() if name.startswith(f"matmul {dtype}"))
        for dtype in flags.dtypes
    }
    matmuls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for dtype, quantization, kept, rows in product(flags.dtypes, flags.quantizations, flags.weight_dtypes, slots):
        if dtype != "float32" and kept not in ("auto", dtype):
            continue  # 16 bits have no other form
        form = {"quantization": None if quantization == "none" else quantization, "weight_dtype": kept}
        step = measure_step(flags.model, dtype, rows, flags.context, **form)
        config: ModelConfig = step.pop("config")
        params = step.pop("params")
        about = {"dtype": dtype, "quantization": quantization, "weight_dtype": kept, "slots": rows}
        products = measure_matmuls(config, params, dtype, rows)
        matmuls += [about | each for each in products]
        held = read_bytes(config, params, rows)
        bound = decode_bound(config, dtype, rows, flags.context, held, bandwidth, peaks[dtype])
        results.append(
            about
            | {"context_tokens": flags.context, "weights_mb": held / 1e6}
            | bound
            | {"matmuls_ms": sum(each["ms"] for each in products)}
            | step
            | {"ratio_to_bound": step["step_ms"] / bound["bound_ms"]}
        )
    print_table("machine: the model's matrix products", matmuls, MATMULS)
    settings = {"model": flags.model, "context": flags.context, "threads": os.cpu_count()}
    report("machine", settings, results, COLUMNS, flags.output, more={"limits": limits, "matmuls": matmuls})


def decode_bound(
    config: ModelConfig,
    dtype: str,
    slots: int,
    context: int,
    weight_bytes: float,
    gb_per_s: float,
    gflop_per_s: float,
) -> dict[str, float]:
    """What a decode step takes at least, in ms: see the module.

    Args:
      slots: rows, each with `context` tokens of K and V in `dtype`.
      weight_bytes: that the step reads, see `read_bytes`.
      gb_per_s, gflop_per_s: of the machine.
    """
    shape = model_shape(config)
    multiplied = shape.token_weights + shape.head_weights
    kv_numbers = slots * context * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    weights_ms, flops_ms = weight_bytes / gb_per_s / 1e6, 2 * slots * multiplied / gflop_per_s / 1e6
    kv_ms = kv_numbers * jnp.dtype(dtype).itemsize / gb_per_s / 1e6
    return {
        "weights_ms": weights_ms,
        "flops_ms": flops_ms,
        "kv_ms": kv_ms,
        "bound_ms": max(weights_ms, flops_ms) + kv_ms,
    }


def read_bytes(config: ModelConfig, params: Any, rows: int) -> float:
    """Bytes of weights, as they lie in memory, that a step reads.

    All but an embedding that is only looked up; of a mixture's experts those that can be expected to be chosen.
    """
    share = 1.0
    if config.experts is not None:
        share = 1.0 - (1.0 - config.experts.num_chosen / config.experts.num_experts) ** rows
    total = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys = [getattr(key, "key", None) for key in path]
        if keys[0] != "embed" or config.tie_word_embeddings:
            total += num_bytes(leaf.shape, leaf.dtype) * (share if "kernels" in keys else 1.0)
    return total


def model_shape(config: ModelConfig) -> ModelShape:
    """The counts of a model's weights."""
    latent, experts = None, {}
    if (ranks := config.latent) is not None:
        sizes = (ranks.qk_nope_head_dim, ranks.qk_rope_head_dim, ranks.v_head_dim)
        latent = LatentShape(ranks.q_lora_rank or 0, ranks.kv_lora_rank, *sizes)
    if config.experts is not None:
        experts = {
            "num_expert_layers": config.mlp_kinds.count("experts"),
            "num_experts": config.experts.num_experts,
            "num_chosen": config.experts.num_chosen,
            "expert_hidden": config.experts.inner_size,
            "shared_hidden": config.experts.shared_size,
        }
    return ModelShape(
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        mlp_hidden=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        tied_embeddings=config.tie_word_embeddings,
        mlp_matrices=2 if "plain" in config.mlp_kinds else 3,
        latent=latent,
        **experts,
    )


def measure_limits(dtypes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Read bandwidth in GB/s by threads, and matrix products in GFLOP/s by dtype."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        cores = os.cpu_count() or 1
        threads = sorted({1, cores, 2 * cores})
        reads = [{"limit": f"read, {n} thread{'s' * (n > 1)}", "value": _host_read(n), "unit": "GB/s"} for n in threads]
    else:
        reads = [{"limit": "read", "value": _device_read(), "unit": "GB/s"}]
    size = PEAK_SIZE.get(device.platform, 8192)
    products = []
    for dtype in dtypes:
        x, kernel = _random((size, size), dtype, 1), _random((size, size), dtype, 2)
        forms = {"": kernel}
        if device.platform == "cpu" and native.is_available() and dtype in native.NATIVE_DTYPES:
            forms[", packed"] = pack(kernel)
        for name, form in forms.items():
            rate = 2 * size**3 / _best(jax.jit(matmul), x, form) / 1e9
            products.append({"limit": f"matmul {dtype}{name}", "value": rate, "unit": "GFLOP/s"})
    return reads + products


def measure_matmuls(config: ModelConfig, params: Any, dtype: str, rows: int) -> list[dict[str, Any]]:
    """The products of one decode step, by shape and form, with an engine's own weights.

    Those of experts are left out: how many there are depends on the tokens.

    Args:
      params: as the engine's programs take them.

    Returns:
      A row per shape and form; `ms` and rates are of all its products together.
    """
    groups: dict[tuple[int, int, bool, str], list[Any]] = defaultdict(list)
    for weight in weights(config):
        if weight.is_matrix and (weight.path != ("embed",) or config.tie_word_embeddings):
            kernel = _matrix(config, params, weight.path)
            is_embedding = weight.path == ("embed",)
            in_size, out_size = weight.shape[::-1] if is_embedding else weight.shape
            groups[in_size, out_size, is_embedding, _form_name(kernel)].append(kernel)
    results = []
    for (in_size, out_size, transposed, form), kernels in groups.items():

        @jax.jit
        def products(x: jax.Array, kernels: list[Any], transposed: bool = transposed) -> list[jax.Array]:
            return [matmul(x, kernel, transposed=transposed) for kernel in kernels]

        seconds = _median(products, _random((rows, in_size), dtype, 0), kernels)
        results.append(
            {
                "form": form,
                "rows": rows,
                "shape": f"[{rows}, {in_size}] x [{in_size}, {out_size}]",
                "count": len(kernels),
                "ms": 1e3 * seconds,
                "gflop_per_s": 2 * rows * len(kernels) * in_size * out_size / seconds / 1e9,
                "gb_per_s": sum(num_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(kernels)) / seconds / 1e9,
            }
        )
    return results


def _form_name(kernel: Any) -> str:
    if isinstance(kernel, QuantisedMatrix):
        return form_of(kernel).name
    if isinstance(kernel, ScaledMatrix):
        return f"{kernel.numbers.dtype.name} by {'channel' if 1 in kernel.scales.shape[-2:] else 'block'}"
    return str(kernel.dtype.name)


def _matrix(config: ModelConfig, params: Any, path: tuple[str | int, ...]) -> Any:
    """A weight in the tree, or in one whose layers are stacked, those of each kind of MLP for themselves."""
    node, keys, place = params, path, None
    if path[0] == "layers" and not isinstance(params["layers"], list):
        layers, kinds, index = params["layers"], config.mlp_kinds, int(path[1])
        stacks = layers if isinstance(layers, tuple) else (layers,)
        node = dict(zip(dict.fromkeys(kinds), stacks, strict=True))[kinds[index]]
        keys, place = path[2:], kinds[:index].count(kinds[index])
    for key in keys:
        node = node[key]
    return node if place is None else jax.tree.map(lambda leaf: leaf[place], node)


def measure_step(model: str, dtype: str, slots: int, context: int, **form: Any) -> dict[str, Any]:
    """The engine's decode step with all `slots` busy, contexts of `context` tokens on average; median, ms.

    Args:
      form: settings of the engine that say how it holds the weights.

    Returns:
      `step_ms`; `config`, the model's; `params`, the weights as the engine held them.
    """
    num_prompt = max(context - STEPS // 2, 1)
    budget = slots + TOKEN_BUDGET
    # As many steps for all as it takes to read every prompt, then those that are timed.
    num_output = STEPS + slots * -(-num_prompt // TOKEN_BUDGET)
    max_model_len = num_prompt + num_output
    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        decode_buckets=(slots,),
        prefill_buckets=(budget,),
        page_size=PAGE_SIZE,
        table_width_buckets=(-(-max_model_len // PAGE_SIZE),),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        **form,
    )
    engine = llm.engine
    rng = np.random.default_rng(0)
    for number in range(slots):
        prompt = rng.integers(0, engine.limits.vocab_size, num_prompt).tolist()
        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
        (request,) = engine.make_requests(Submission(prompt, params, str(number)), now=time.monotonic())
        engine.add(request, 0, _forget)
    stats = engine.stats = EngineStats()
    seconds = []
    while engine.has_work:
        before = (stats.prefill_tokens, stats.slot_steps)
        began = time.perf_counter()
        engine.step()
        took = time.perf_counter() - began
        if stats.prefill_tokens == before[0] and stats.slot_steps == before[1] + slots:
            seconds.append(took)
    assert seconds, "no iteration had all slots decoding"
    about_step = {"step_ms": 1e3 * statistics.median(seconds), "steps_timed": len(seconds)}
    return about_step | {"config": engine.model_config, "params": engine.runner.params}


def _forget(delta: OutputDelta) -> None:
    """A sink for outputs that nobody reads."""


def _host_read(threads: int) -> float:
    """GB/s of plain reads: the maximum of integers costs the processor least, so memory is what is timed."""
    parts = np.array_split(np.ones(READ_BYTES // 4, np.int32), 8 * threads)
    with ThreadPoolExecutor(threads) as pool:
        seconds = []
        for _ in range(TRIES):
            began = time.perf_counter()
            list(pool.map(np.max, parts))
            seconds.append(time.perf_counter() - began)
    return READ_BYTES / min(seconds) / 1e9


def _device_read() -> float:
    values = jnp.ones(READ_BYTES // 4, jnp.float32)
    return READ_BYTES / _best(jax.jit(jnp.sum), values) / 1e9


def _random(shape: tuple[int, int], dtype: str, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype))


def _times(function: Callable[..., Any], *arguments: Any) -> list[float]:
    """Seconds of `TRIES` calls, after one that compiles."""
    seconds = []
    for _ in range(TRIES + 1):
        began = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def _best(function: Callable[..., Any], *arguments: Any) -> float:
    return min(_times(function, *arguments))


def _median(function: Callable[..., Any], *arguments: Any) -> float:
    return statistics.median(_times(function, *arguments))

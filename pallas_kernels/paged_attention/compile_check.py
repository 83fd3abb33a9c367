"""Compiles every kernel for every target and shape without a device, and says what is proven about it.

A program fails if it does not compile, has temporary memory of the pool's size or, on GPU, spills. The table
tells apart what was interpreted, what was compiled only and what is refused; nothing counts as run that was not.

On TPU spills are shown and do not fail: a block of scores is larger than the 64 vector registers, so it lies in
on-chip memory, and its loads and stores are in the bundles that `loop` counts. README.md has the figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common import static_measures
from pallas_kernels.common.deviceless import TARGETS, Target, compile_for, missing
from pallas_kernels.common.static_measures import Measures
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention.api import KERNELS, paged_attention
from pallas_kernels.paged_attention.mosaic_gpu import takes_wgmma, tile_rows
from pallas_kernels.paged_attention.mosaic_gpu_tuning import MMA_BLOCK, tune_wgmma
from pallas_kernels.paged_attention.mosaic_gpu_wgmma import WARPGROUP_ROWS
from pallas_kernels.paged_attention.mosaic_tpu import form_of
from pallas_kernels.paged_attention.mosaic_tpu_kernel import heads_side_by_side
from pallas_kernels.paged_attention.specs import SPECS, Spec


@dataclass(frozen=True, slots=True)
class Proof:
    """A line of the table.

    Attributes:
      kernel, target, shape: what was looked at; `kernel` is an implementation of attention, or "write_kv".
      state: "compiled, not run", "ran (interpreted, races checked)", "ran on hardware", "refused: ..." where
        the implementation says that it lacks the shape, "not looked at: ..." or "FAILED: ...".
      measures: of the kernels in the program.
      temp_bytes: of the program.
      share: estimated share of the roofline, of memory bandwidth in decode and of matrix products in prefill;
        None: unknown.
      seconds: spent.
    """

    kernel: str
    target: str
    shape: str
    state: str
    measures: tuple[Measures, ...] = ()
    temp_bytes: int = 0
    share: float | None = None
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.state.startswith("FAILED")


class _Call(NamedTuple):
    """A kernel's call, to be compiled; `donate` as for `compile_for`."""

    kernel: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()


def _attention(target: Target, spec: Spec) -> _Call:
    name = target.implementation
    return _Call(name, spec.attend(name), spec.abstract_args(name))


def _kv_write(target: Target, spec: Spec) -> _Call:
    """`write_kv`'s kernel on the tokens, and in prefill the rows, of `spec`."""
    _, pool, layer, _, _, starts, scales = spec.abstract_args(target.implementation)
    new = jax.ShapeDtypeStruct((spec.num_tokens, spec.num_kv_heads, spec.head_dim), jnp.dtype(spec.dtype))
    places = jax.ShapeDtypeStruct((spec.num_tokens,), jnp.int32)

    def write(pool: Any, layer: Any, k: Any, v: Any, pages: Any, offsets: Any, scales: Any, starts: Any) -> Any:
        return write_kv(pool, layer, k, v, pages, offsets, scales, starts=starts, implementation="mosaic_tpu")

    return _Call("write_kv", write, (pool, layer, new, new, places, places, scales, starts), donate=(0,))


def check(target: Target, spec: Spec, folder: Path | None = None, *, writes: bool = False) -> Proof:
    """Compiles one shape for one target.

    Args:
      folder: as given to `static_measures.ask_for`; None: no measures.
      writes: the kernel of `write_kv`, which there is for TPU, and not of attention.
    """
    began = time.monotonic()
    call = (_kv_write if writes else _attention)(target, spec)
    subject = (call.kernel, target.name, spec.name)
    if missing(target):
        return Proof(*subject, f"not looked at: {missing(target)}")
    try:
        jax.eval_shape(call.function, *call.args)
    except (ValueError, NotImplementedError) as error:
        return Proof(*subject, f"refused: {error}")
    try:
        compiled = compile_for(target, call.function, call.args, donate=call.donate)
    except Exception as error:  # whatever a compiler raises is a line of the table
        return Proof(*subject, f"FAILED: {type(error).__name__}: {str(error).splitlines()[0]}")
    temp = int(compiled.memory_analysis().temp_size_in_bytes)
    measures = tuple(static_measures.take(folder)) if folder else ()
    return Proof(
        *subject,
        _verdict(target, spec, temp, measures),
        measures,
        temp,
        roofline_share(target, spec, measures[-1]) if measures and not writes else None,
        time.monotonic() - began,
    )


def _verdict(target: Target, spec: Spec, temp_bytes: int, measures: tuple[Measures, ...]) -> str:
    pool_bytes = spec.pool_bytes(target.implementation)
    if temp_bytes >= pool_bytes:
        return f"FAILED: {temp_bytes} temporary bytes, the pool has {pool_bytes}: it is copied"
    if target.platform == "cuda" and (spilled := sum(kernel.spilled for kernel in measures)):
        return f"FAILED: {spilled} bytes spilled"
    return "compiled, not run"


def roofline_share(target: Target, spec: Spec, kernel: Measures) -> float | None:
    """What the loop over K/V blocks allows, if it issues an instruction or bundle per clock and never waits.

    The time that a turn's bytes (decode) or products (prefill) take at the target's peak, over the time that
    its instructions take, at most 1. On GPU the four warps of a warpgroup issue side by side on a multiprocessor's
    four schedulers; two warpgroups take turns. Waiting is not counted, which makes it too high; branches that
    exclude each other all are, which makes it too low.
    """
    if not kernel.loop:
        return None
    rows, tokens, heads = _turn(target, spec)
    if spec.prefill:
        work, peak = 4 * rows * tokens * spec.head_dim * heads, target.flops
    else:
        work, peak = 2 * tokens * spec.head_dim * spec.pool_dtype.itemsize * heads, target.bandwidth
    return min(1.0, work / (peak / target.num_cores) * target.clock / kernel.loop)


def _turn(target: Target, spec: Spec) -> tuple[int, int, int]:
    """What a turn of the loop that `Measures.loop` counts works on: query rows, tokens and KV heads."""
    q, pool, _, _, _, starts, _ = spec.abstract_args(target.implementation)
    if target.platform == "tpu":
        form = form_of(q, pool, starts)
        return form.rows, form.block_tokens, heads_side_by_side(form)
    if spec.prefill and takes_wgmma(q, pool):
        return WARPGROUP_ROWS, tune_wgmma(spec.head_dim).block, 1
    return tile_rows(spec.num_heads // spec.num_kv_heads, pool, spec.prefill), MMA_BLOCK, 1


def interpret(implementation: str, prefill: bool) -> Proof:
    """Runs a small case of a kernel, interpreted with race detection, or on its device, against the reference."""
    began = time.monotonic()
    on_device = jax.default_backend() == {"mosaic_tpu": "tpu", "mosaic_gpu": "gpu"}[implementation]
    shape = f"4 rows of up to 40 tokens, {'prefill' if prefill else 'decode'}"
    rng = np.random.default_rng(0)
    contexts = np.asarray([1, 17, 0, 40], np.int32)
    pool = np.full((2, 9, 2, 2, 16, 128), np.nan, jnp.bfloat16)
    table = np.asarray([[8, 0, 0], [3, 0, 0], [5, 5, 5], [1, 7, 2]], np.int32)
    for row, context in enumerate(contexts):
        for token in range(context):
            pool[1, table[row, token // 16], :, :, token % 16] = rng.normal(size=(2, 2, 128))
    starts = jnp.asarray([0, 1, 4, 4, 9], jnp.int32) if prefill else None
    q = jnp.asarray(rng.normal(size=(9 if prefill else 4, 8, 128)), jnp.bfloat16)
    args = (q, jnp.asarray(pool), 1, jnp.asarray(table), jnp.asarray(contexts), starts)
    out = paged_attention(*args, implementation=implementation, interpret=not on_device)
    wanted = paged_attention(*args, implementation="reference")
    error = float(jnp.max(jnp.abs(out.astype(jnp.float32) - wanted.astype(jnp.float32))))
    state = "ran on hardware" if on_device else "ran (interpreted, races checked)"
    if not error < 2e-2:
        state = f"FAILED: differs from the reference by {error}"
    return Proof(implementation, jax.default_backend(), shape, state, seconds=time.monotonic() - began)


def table(proofs: list[Proof]) -> str:
    """The proofs as aligned text."""
    head = ("kernel", "target", "shape", "registers", "smem", "spilled", "code", "loop", "share", "temp MiB", "state")
    lines = [head, *(_cells(proof) for proof in proofs)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]) for line in lines
    )


def _cells(proof: Proof) -> tuple[str, ...]:
    kernel = proof.measures[-1] if proof.measures else None
    figures = [str(getattr(kernel, name) or "") if kernel else "" for name in ("registers", "smem_bytes")]
    figures += [str(getattr(kernel, name)) if kernel else "" for name in ("spilled", "instructions", "loop")]
    share = "" if proof.share is None else f"{proof.share:.2f}"
    temp = f"{proof.temp_bytes / 2**20:.1f}" if proof.state.startswith("compiled") else ""
    return (proof.kernel, proof.target, proof.shape, *figures, share, temp, proof.state)


def run(targets: list[str], shapes: str, folder: Path) -> Iterator[Proof]:
    """A proof per attention kernel that can be run or interpreted, then one per target, kernel and shape."""
    for implementation in KERNELS:
        if any(TARGETS[name].implementation == implementation for name in targets):
            yield from (interpret(implementation, prefill) for prefill in (False, True))
    for name in targets:
        for writes in (False, True) if TARGETS[name].platform == "tpu" else (False,):
            yield from (check(TARGETS[name], spec, folder, writes=writes) for spec in SPECS if shapes in spec.name)


def main(argv: list[str] | None = None) -> int:
    """Prints the table; 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="tools/compile_check", description=__doc__)
    parser.add_argument("--targets", default=",".join(TARGETS), help="comma-separated; default: %(default)s")
    parser.add_argument("--shapes", default="", help="only shapes whose name contains this")
    parser.add_argument("--output", help="also write JSON here")
    options = parser.parse_args(argv)
    targets = options.targets.split(",")
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"--targets has {', '.join(sorted(unknown))}; known are {', '.join(TARGETS)}")
    proofs = []
    with tempfile.TemporaryDirectory() as name:
        static_measures.ask_for(Path(name))
        for proof in run(targets, options.shapes, Path(name)):
            proofs.append(proof)
            print(f"{proof.target} {proof.kernel} {proof.shape}: {proof.state}", file=sys.stderr)
    print(table(proofs))
    if options.output:
        records: list[dict[str, Any]] = [asdict(proof) for proof in proofs]
        Path(options.output).write_text(json.dumps({"jax": jax.__version__, "proofs": records}, indent=1) + "\n")
    return int(any(proof.failed for proof in proofs))


if __name__ == "__main__":
    sys.exit(main())

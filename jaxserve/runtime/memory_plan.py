"""The memory plan: what weights, workspace, slot state and KV pages take, decided before serving.

The workspace is not guessed: the largest bucket is compiled first and its `memory_analysis()` read.
What is left of the allowed memory becomes pages.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from jaxserve.config import SchedulerConfig
from pallas_kernels.matmul import num_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one device (every device of the mesh holds as much).

    Attributes:
      limit_bytes: memory that may be used.
      weights_bytes, workspace_bytes, state_bytes, kv_bytes: shares.
      num_pages: pages, the null page included.
      page_size: tokens per page.
      num_host_pages, host_bytes: of the host pool for swapped requests; on the host, not the device.
      most_pages_per_seq: pages that a request holds at once, at most.
      sliding_window: tokens that bound it; 0: none do, a request holds the pages of all its tokens.
      group_windows: windows of groups of layers that have pages of their own, see `SchedulerConfig`; empty: one group.
      layers_per_group: that a page is of.
      max_model_len: most tokens of a request.
    """

    limit_bytes: int
    weights_bytes: int
    workspace_bytes: int
    state_bytes: int
    kv_bytes: int
    num_pages: int
    page_size: int
    num_host_pages: int = 0
    host_bytes: int = 0
    most_pages_per_seq: int = 0
    sliding_window: int = 0
    group_windows: tuple[int, ...] = ()
    layers_per_group: int = 0
    max_model_len: int = 0

    @property
    def max_tokens(self) -> int:
        """Tokens whose K and V fit at once, where none of them is given back."""
        return (self.num_pages - 1) // max(len(self.group_windows), 1) * self.page_size

    @property
    def max_long_tokens(self) -> int:
        """Tokens of requests of `max_model_len` that fit at once, as each gives back what its windows leave behind."""
        return (self.num_pages - 1) * self.max_model_len // max(self.most_pages_per_seq, 1)

    def as_dict(self) -> dict[str, Any]:
        """Every number, by name."""
        return {**asdict(self), "max_tokens": self.max_tokens, "max_long_tokens": self.max_long_tokens}

    def rows(self) -> list[tuple[str, str]]:
        """Label and value of each line of the table shown at start-up."""
        rows = [
            ("weights", format_bytes(self.weights_bytes)),
            ("workspace of the largest step", format_bytes(self.workspace_bytes)),
            ("slot state", format_bytes(self.state_bytes)),
            (f"KV pool: {self.num_pages} pages of {self.page_size} tokens", format_bytes(self.kv_bytes)),
            (f"tokens held at once{', if none is given back' * bool(self.group_windows)}", f"{self.max_tokens:,}"),
            ("allowed (memory_fraction)", format_bytes(self.limit_bytes)),
        ]
        if self.sliding_window:
            label = f"pages of a request, by its window of {self.sliding_window:,} tokens"
            rows.append((label, f"{self.most_pages_per_seq:,} at most"))
        if self.group_windows:
            groups = ", ".join(
                f"{self.group_windows.count(window)} of {f'a window of {window:,} tokens' if window else 'all tokens'}"
                for window in dict.fromkeys(self.group_windows)
            )
            rows.append((f"groups of {self.layers_per_group} layers, each with pages of its own", groups))
            rows.append(("pages of a request, by these windows", f"{self.most_pages_per_seq:,} at most"))
            rows.append((f"held at once of requests of {self.max_model_len:,} tokens", f"{self.max_long_tokens:,}"))
        if self.num_host_pages:
            rows.append((f"host pool (swap_space): {self.num_host_pages} pages", format_bytes(self.host_bytes)))
        return rows


def weights_bytes(params: Any) -> int:
    """What the weights take on one device."""
    return sum(bytes_on_a_device(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(params))


def bytes_on_a_device(shape: tuple[int, ...], dtype: Any, sharding: Any) -> int:
    """Of the part of an array that a device holds."""
    return num_bytes(sharding.shard_shape(shape), dtype)


def free_bytes(params: Any, mesh: Mesh) -> int:
    """Memory of each of this process' devices of a mesh that may be planned with, that of the weights included.

    Args:
      params: weights, or their shapes.
    """
    own = mesh.local_devices
    if own[0].platform != "cpu":
        return min(map(available_bytes, own))
    # Host "devices" share one memory, and the weights are in it already, unless they are shapes alone.
    is_loaded = all(isinstance(x, jax.Array) for x in jax.tree.leaves(params))
    return available_bytes(own[0]) // len(own) + weights_bytes(params) * is_loaded


def available_bytes(device: jax.Device) -> int:
    """Memory of a device that may be planned with: its own limit, or the host's free memory on CPU."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return _cgroup_or_host_bytes()


def _cgroup_or_host_bytes() -> int:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    free = int(line.split()[1]) * 1024
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            text = limit.read().strip()
            if text != "max":
                free = min(free, int(text) - int(used.read()))
    except OSError:
        return free
    return free


def make_plan(
    *,
    allowed_bytes: int,
    weights_bytes: int,
    workspace_bytes: int,
    state_bytes: int,
    page_bytes: int,
    page_size: int,
    num_pages: int | None,
    most_pages: int,
    num_host_pages: int = 0,
    host_bytes: int = 0,
    most_pages_per_seq: int = 0,
    sliding_window: int = 0,
    group_windows: tuple[int, ...] = (),
    layers_per_group: int = 0,
    max_model_len: int = 0,
) -> MemoryPlan:
    """Sizes the KV pool.

    Args:
      allowed_bytes: memory that may be used in all.
      page_bytes: bytes of one page.
      num_pages: the caller's choice; None: as many as fit.
      most_pages: pages beyond which no request set can use more (slots x pages that a sequence holds at once + null
        page).
      num_host_pages, host_bytes, and all that follows: passed on.

    Raises:
      ValueError: nothing is left for pages.
    """
    left = allowed_bytes - weights_bytes - workspace_bytes - state_bytes
    if num_pages is None:
        num_pages = min(most_pages, left // page_bytes)
        if num_pages < 2:
            raise ValueError(
                f"{format_bytes(allowed_bytes)} are allowed (memory_fraction) and {format_bytes(allowed_bytes - left)}"
                " are taken before the KV pool, which leaves no room for a page; raise memory_fraction, or lower"
                " max_num_seqs, max_num_batched_tokens, dtype or kv_cache_dtype"
            )
    else:
        check_pages_fit(num_pages, page_bytes, left, allowed_bytes)
    return MemoryPlan(
        limit_bytes=allowed_bytes,
        weights_bytes=weights_bytes,
        workspace_bytes=workspace_bytes,
        state_bytes=state_bytes,
        kv_bytes=num_pages * page_bytes,
        num_pages=num_pages,
        page_size=page_size,
        num_host_pages=num_host_pages,
        host_bytes=host_bytes,
        most_pages_per_seq=most_pages_per_seq,
        sliding_window=sliding_window,
        group_windows=group_windows,
        layers_per_group=layers_per_group,
        max_model_len=max_model_len,
    )


def check_pages_fit(num_pages: int, page_bytes: int, left_bytes: int, allowed_bytes: int) -> None:
    """Raises ValueError unless `left_bytes` of the `allowed_bytes` hold so many pages."""
    if num_pages * page_bytes > left_bytes:
        left = format_bytes(max(left_bytes, 0))
        raise ValueError(
            f"num_pages is {num_pages}: {format_bytes(num_pages * page_bytes)} of KV; {left} are left of the"
            f" {format_bytes(allowed_bytes)} allowed; lower num_pages or raise memory_fraction"
        )


def num_host_pages(swap_space: float, page_bytes: int, limits: SchedulerConfig) -> int:
    """Pages of the host pool: as many as fit, at most what all live requests together could hold.

    Args:
      swap_space: GiB.
      page_bytes: of a page on all devices.

    Raises:
      ValueError: not one fits.
    """
    fitting = int(swap_space * 2**30) // page_bytes
    if not fitting:
        raise ValueError(
            f"swap_space is {swap_space:g} GiB; a page is {format_bytes(page_bytes)}: raise swap_space, or set"
            " preemption to recompute"
        )
    return min(fitting, (limits.max_num_seqs + limits.max_queue_requests) * limits.most_pages_per_seq)


def format_bytes(count: int) -> str:
    """Bytes with a binary unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"

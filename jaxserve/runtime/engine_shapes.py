"""EngineShapes: what an engine's settings come to on given devices, before anything is allocated or compiled.

An engine that starts and a plan for devices that are not there begin with the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.models import ModelConfig, group_layers
from jaxserve.runtime.kv_pool import SWAP_BLOCK, PoolLayout, attention_implementation
from jaxserve.runtime.memory_plan import MemoryPlan, bytes_on_a_device, make_plan, weights_bytes
from jaxserve.runtime.page_transfers import MAX_OUTGOING
from jaxserve.runtime.slot_state import abstract_slot_state
from jaxserve.tables import BucketTable


@dataclass(frozen=True, slots=True)
class EngineShapes:
    """Shapes on a mesh, whose devices may be absent ones.

    Attributes:
      model_config: the model, with the context length that is served.
      config: the engine's settings.
      params: weights, or their shapes with shardings.
      kv: the pool's layout.
      buckets: sizes of the steps.
      limits: the scheduler's settings for a pool of two pages.
    """

    model_config: ModelConfig
    config: EngineConfig
    params: Any
    kv: PoolLayout
    buckets: BucketTable
    limits: SchedulerConfig

    @classmethod
    def of(
        cls, model_config: ModelConfig, params: Any, config: EngineConfig, max_model_len: int, mesh: Mesh
    ) -> EngineShapes:
        """See the class.

        Raises:
          ValueError: settings that do not fit the model or each other.
        """
        model_config = replace(model_config, served_length=max_model_len)
        kv = PoolLayout(
            model_config,
            mesh,
            config.page_size,
            config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
            attention_implementation(config, model_config, mesh.devices.flat[0].platform),
            group_layers(model_config.sliding_windows, max_model_len, config.page_size),
        )
        limits = config.scheduler_config(max_model_len=max_model_len, num_pages=2, windows=kv.groups.windows)
        buckets = BucketTable(
            limits, decode=config.decode_buckets, prefill=config.prefill_buckets, widths=config.table_width_buckets
        )
        return cls(model_config, config, params, kv, buckets, limits)

    @property
    def weights_bytes(self) -> int:
        """Of the weights on one device."""
        return weights_bytes(self.params)

    @property
    def state_bytes(self) -> int:
        """Of the slot state on one device; every device has all of it."""
        everywhere = NamedSharding(self.kv.mesh, PartitionSpec())
        state = abstract_slot_state(self.config.max_num_seqs, self.model_config.vocab_size)
        return sum(bytes_on_a_device(x.shape, x.dtype, everywhere) for x in state)

    @property
    def most_pages(self) -> int:
        """Pages beyond which no set of requests in the slots can use more, the null page included."""
        return self.config.max_num_seqs * self.limits.most_pages_per_seq + 1

    @property
    def swap_bytes(self) -> int:
        """Of blocks of pages that may lie beside a step on each device: one on its way out, one on its way in, and
        those that leave for other engines."""
        swaps, moves_kv = self.config.swaps, self.config.moves_kv
        num_blocks = 2 * (swaps or moves_kv) + MAX_OUTGOING * moves_kv
        return num_blocks * SWAP_BLOCK * self.kv.bytes_on_a_device(1)

    def guess_pages(self, allowed_bytes: int) -> int:
        """As many pages as there will be if memory is ample: a program compiled for them is then the one that runs."""
        left = allowed_bytes - self.weights_bytes
        return self.config.num_pages or max(2, min(self.most_pages, left // self.kv.bytes_on_a_device(1)))

    def memory_plan(self, allowed_bytes: int, step_bytes: int, host_pages: int = 0) -> MemoryPlan:
        """The memory plan of one device.

        Args:
          allowed_bytes: memory that may be used in all.
          step_bytes: temporary and output bytes of the largest step.
          host_pages: of the host pool.

        Raises:
          ValueError: nothing is left for pages.
        """
        limits = self.limits
        return make_plan(
            allowed_bytes=allowed_bytes,
            weights_bytes=self.weights_bytes,
            workspace_bytes=step_bytes + self.swap_bytes,
            state_bytes=self.state_bytes,
            page_bytes=self.kv.bytes_on_a_device(1),
            page_size=self.config.page_size,
            num_pages=self.config.num_pages,
            most_pages=self.most_pages,
            num_host_pages=host_pages,
            host_bytes=host_pages * self.kv.page_bytes,
            most_pages_per_seq=limits.most_pages_per_seq,
            sliding_window=limits.sliding_window,
            group_windows=limits.group_windows,
            layers_per_group=self.kv.groups.size,
            max_model_len=limits.max_model_len,
        )

"""Speed by the roofline of `simulate`, and what the interconnect adds to it. Bounds: nothing was run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.plan.compiled import CompiledStep
from jaxserve.plan.sizing import Sizing
from jaxserve.sim.cost_model import StepFeatures, mean_seen
from jaxserve.sim.roofline import ModelShape, RooflineCost

_WEIGHT_BITS = {"int8": 8, "int8_channel": 8, "fp8": 8, "int4": 4}
_BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "fp8": 8}


@dataclass(frozen=True, slots=True)
class Speed:
    """One iteration.

    Attributes:
      rows, tokens: decode rows of it, and prompt tokens.
      context: tokens of context of each row, or of the prompt at the chunk's end.
      compute_s, memory_s: of the device.
      roofline_s: what `simulate` would take: the longer of both, and the overhead.
      interconnect_s: that collectives take at the links' full speed; None: not known.
    """

    rows: int
    tokens: int
    context: int
    compute_s: float
    memory_s: float
    roofline_s: float
    interconnect_s: float | None

    @property
    def total_s(self) -> float:
        """With the interconnect, which nothing else hides."""
        return self.roofline_s + (self.interconnect_s or 0.0)

    @property
    def tokens_per_s(self) -> float:
        """Decoded, or of prompts."""
        return (self.tokens or self.rows) / self.total_s


class SpeedEstimate:
    """The roofline of a sizing.

    Args:
      sizing: model and slice.
      shape: the model as the roofline reads it.
      decode, mixed: compiled steps, for their collectives; None: two all-reduces a layer and one of the embedding.
      efficiency: `compute_efficiency`, `memory_efficiency` and `overhead_s` of `RooflineCost`.
    """

    def __init__(
        self,
        sizing: Sizing,
        shape: ModelShape,
        decode: CompiledStep | None,
        mixed: CompiledStep | None,
        efficiency: dict[str, float],
    ) -> None:
        config, groups = sizing.shapes.config, sizing.shapes.kv.groups
        self._sizing, self._decode, self._mixed = sizing, decode, mixed
        self._windows = groups.windows
        self._num_devices = config.tensor_parallel_size
        self.cost = RooflineCost(
            sizing.where.chip,
            shape,
            num_chips=self._num_devices,
            weight_bits=_WEIGHT_BITS.get(config.quantization or "", _BITS[config.dtype]),
            kv_bits=_BITS[config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype],
            page_size=config.page_size,
            num_groups=len(groups.windows),
            **efficiency,
        )

    def decode_features(self, rows: int, context: int) -> StepFeatures:
        """A step of rows alone, with so many tokens of context each, their own included."""
        seen = mean_seen([context - 1] * rows, [1] * rows, self._windows)
        return StepFeatures(decode_rows=rows, decode_context=seen, emitted=rows)

    def prefill_features(self, tokens: int) -> StepFeatures:
        """The first tokens of a prompt."""
        read = [min(tokens, window - 1 + tokens) if window else tokens for window in self._windows]
        return StepFeatures(
            prefill_tokens=tokens,
            prefill_attention=mean_seen([0], [tokens], self._windows),
            prefill_context=sum(read) // len(read),
            emitted=1,
        )

    def decode(self, rows: int, context: int) -> Speed:
        """Of a step of decode rows alone."""
        return self._speed(self.decode_features(rows, context), rows, 0, context, self._decode)

    def prefill(self, tokens: int) -> Speed:
        """Of a step with the first tokens of a prompt alone."""
        return self._speed(self.prefill_features(tokens), 0, tokens, tokens, self._mixed)

    def _speed(self, features: StepFeatures, rows: int, tokens: int, context: int, step: CompiledStep | None) -> Speed:
        cost = self.cost
        times = cost.compute_s(features), cost.memory_s(features), cost.step_s(features)
        return Speed(rows, tokens, context, *times, self.sent_bytes(rows + tokens, step) / self._link_bandwidth)

    def sent_bytes(self, tokens: int, step: CompiledStep | None) -> float:
        """Bytes that a device sends in a step of so many tokens: of the compiled step, by its tokens."""
        if self._num_devices == 1:
            return 0.0
        if step is not None:
            return step.sent_bytes(self._num_devices) * tokens / step.tokens
        model, config = self._sizing.shapes.model_config, self._sizing.shapes.config
        ring = 2 * (self._num_devices - 1) / self._num_devices
        return (2 * model.num_layers + 1) * tokens * model.hidden_size * _BITS[config.dtype] / 8 * ring

    @property
    def _link_bandwidth(self) -> float:
        return self._sizing.where.link_bandwidth(self._num_devices)

    def arithmetic(self, rows: int, context: int, tokens: int) -> list[str]:
        """The roofline with its numbers, for a decode step and a chunk, as `simulate` prints it; then the links."""
        lines = [f"-- decode: {rows} rows, {context} tokens of context each"]
        lines += self.cost.explain(self.decode_features(rows, context))
        lines += [self._link_line(rows, self._decode)]
        lines += [f"-- prefill: the first {tokens} tokens of a prompt"]
        lines += self.cost.explain(self.prefill_features(tokens))
        return [*lines, self._link_line(tokens, self._mixed)]

    def _link_line(self, tokens: int, step: CompiledStep | None) -> str:
        if self._num_devices == 1:
            return "interconnect: one device, nothing is sent"
        where, sent = self._sizing.where, self.sent_bytes(tokens, step)
        how = (
            f"{step.sent_bytes(self._num_devices):.3e} in the compiled step of {step.tokens} tokens, by tokens"
            if step is not None
            else "by arithmetic: two all-reduces of the hidden state a layer, one of the embedding"
        )
        return (
            f"interconnect: {sent:.3e} bytes sent by each device ({how}) at {self._link_bandwidth / 1e9:.0f} GB/s"
            f" of {where.link.name}: {sent / self._link_bandwidth:.3e} s, without latencies; not in the line above"
        )


def batches(slots: int, most: int) -> list[int]:
    """Numbers of decode rows to tell of: 1, 8, 32 and so on up to 512, and that of slots; none above `most`."""
    return sorted(rows for rows in {1, 8, 32, 128, 512, slots} if rows <= max(most, slots))


def as_rows(speeds: Sequence[Speed]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "decode_rows": each.rows,
            "prefill_tokens": each.tokens,
            "context": each.context,
            "compute_s": each.compute_s,
            "memory_s": each.memory_s,
            "roofline_s": each.roofline_s,
            "interconnect_s": each.interconnect_s,
            "total_s": each.total_s,
            "tokens_per_s": each.tokens_per_s,
        }
        for each in speeds
    ]

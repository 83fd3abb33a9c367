"""Roofline: an iteration takes as long as its arithmetic or its memory traffic, whichever is longer.

    FLOPs = 2 x weights of a token x tokens + 2 x vocabulary x hidden x sampled positions
            + 4 x layers x query heads x head dim x (K/V tokens attended to)
    bytes = weights, once + K/V tokens read + K/V tokens written
    seconds = overhead + max(FLOPs / (peak x efficiency), bytes / (bandwidth x efficiency))
              + swapped bytes / host bandwidth

Weights are read once per iteration because one program holds its prefill and decode rows. Of a mixture of
experts a token's weights are those of its own experts; read are those that any token of the iteration has, as many as
can be expected if every expert is equally likely. FLOPs and bytes are those of one device: devices share what divides
among them, heads, KV heads, inner widths, experts, vocabulary, and each has all of what does not, as the engine's own
sharding rules have it. Of more devices than KV heads, several hold one head. Where KV heads do not divide otherwise,
each device attends for all heads. Their communication is not counted, nor is padding to buckets, nor are scales of
quantised numbers; with 8 or 4 bits all matrices are taken to have them. Latent attention is counted in absorbed form: a
row of `kv_rank + rope` numbers per token and layer, on every device. A roofline is a bound to reason with;
`tools/fit_cost_model` gives what an engine really takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxserve.config.engine_config import check_page_size
from jaxserve.sim.cost_model import StepFeatures
from jaxserve.sim.json_fields import JsonFields, read_json


@dataclass(frozen=True, slots=True)
class Chip:
    """One accelerator: dense bfloat16 FLOP/s, bytes per second, bytes."""

    name: str
    peak_flops: float
    bandwidth: float
    memory_bytes: float


CHIPS = {
    chip.name: chip
    for chip in (
        # https://cloud.google.com/tpu/docs/v6e compares v5e and v6e (earlier versions of it say 819 and 1640 GB/s).
        Chip("v5e", 197e12, 800e9, 16e9),
        Chip("v6e", 918e12, 1600e9, 32e9),
        # https://cloud.google.com/tpu/docs/v5p
        Chip("v5p", 459e12, 2765e9, 95e9),
        # NVIDIA H100 and H200 data sheets, SXM: 1979 TFLOP/s with sparsity, half of it dense.
        Chip("h100", 989.5e12, 3.35e12, 80e9),
        Chip("h200", 989.5e12, 4.8e12, 141e9),
    )
}


# Families by `model_type`, as far as published configs leave out what counts here.
_TIED_UNLESS_TOLD = ("gemma2", "gemma3_text", "smollm3", "starcoder2")
_WITHOUT_GATE = ("starcoder2",)


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Multi-head latent attention: ranks and sizes of a head; `q_rank` 0: queries have no latent."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int

    @property
    def row(self) -> int:
        """Numbers that are kept of a token in a layer."""
        return self.kv_rank + self.rope


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder. Names as in design words: layers, heads, dimensions.

    The MLPs of the last `num_expert_layers` layers are mixtures: `num_chosen` of `num_experts` of width
    `expert_hidden` for every token, and `shared_hidden` for all. Those of the others have `mlp_matrices`: 3 with a
    gate, 2 without; experts have gates. With `latent`, `num_kv_heads` is 1 and `head_dim` its row.
    """

    num_layers: int
    hidden: int
    mlp_hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    num_expert_layers: int = 0
    num_experts: int = 0
    num_chosen: int = 0
    expert_hidden: int = 0
    shared_hidden: int = 0
    mlp_matrices: int = 3
    latent: LatentShape | None = None

    @classmethod
    def from_file(cls, path: str | Path) -> ModelShape:
        """Reads a Hugging Face config.json, or the one in a directory.

        Raises:
          ValueError: a field is missing.
        """
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        fields = JsonFields(read_json(path), str(path))
        kind, latent = fields.any("model_type", None), _latent_of(fields)
        hidden, heads = fields.integer("hidden_size", 1), fields.integer("num_attention_heads", 1)
        # null stands for "as usual", as in the model library.
        kv_heads = (
            heads if fields.any("num_key_value_heads", None) is None else fields.integer("num_key_value_heads", 1)
        )
        head_dim = hidden // heads if fields.any("head_dim", None) is None else fields.integer("head_dim", 1)
        return cls(
            num_layers=fields.integer("num_hidden_layers", 1),
            hidden=hidden,
            mlp_hidden=fields.integer("intermediate_size", 1),
            num_heads=heads,
            num_kv_heads=kv_heads if latent is None else 1,
            head_dim=head_dim if latent is None else latent.row,
            vocab_size=fields.integer("vocab_size", 1),
            tied_embeddings=fields.boolean("tie_word_embeddings", kind in _TIED_UNLESS_TOLD),
            mlp_matrices=2 if kind in _WITHOUT_GATE else 3,
            latent=latent,
            **_experts_of(fields),
        )

    @property
    def layer_weights(self) -> int:
        """Of the matrix multiplications of all layers, every expert's."""
        return int(sum(self.parts(self.num_experts).values()))

    @property
    def token_weights(self) -> int:
        """Of `layer_weights`, those that one token is multiplied with."""
        return int(sum(self.parts(self.num_chosen).values()))

    def read_weights(self, tokens: int) -> float:
        """Of `layer_weights`, those that a step of so many tokens can be expected to read."""
        return sum(self.parts(self.experts_read(tokens)).values())

    def experts_read(self, tokens: int) -> float:
        """Experts of a layer that a step of so many tokens can be expected to read."""
        if not self.num_experts:
            return 0.0
        return self.num_experts * (1.0 - (1.0 - self.num_chosen / self.num_experts) ** tokens)

    def parts(self, experts: float) -> dict[str, float]:
        """`layer_weights` by what devices may share them by, with so many experts in a layer."""
        layers, mixed = self.num_layers, self.num_expert_layers
        kv_heads, whole = 2 * self.num_kv_heads * self.head_dim * self.hidden, 0
        heads = 2 * self.num_heads * self.head_dim * self.hidden
        if (latent := self.latent) is not None:
            kv_heads, whole = 0, self.hidden * (latent.q_rank + latent.row)
            queries = (latent.q_rank or self.hidden) * (latent.nope + latent.rope)
            made_of_latents = latent.kv_rank * (latent.nope + latent.value)
            heads = self.num_heads * (queries + made_of_latents + latent.value * self.hidden)
        return {
            "heads": layers * heads,
            "kv_heads": layers * kv_heads,
            "whole": layers * whole + mixed * self.hidden * self.num_experts,
            "mlp": (layers - mixed) * self.mlp_matrices * self.hidden * self.mlp_hidden,
            "shared": mixed * 3 * self.hidden * self.shared_hidden,
            "experts": mixed * 3 * self.hidden * self.expert_hidden * experts,
        }

    def share(self, part: str, num_devices: int) -> float:
        """Of one of `parts`, or of "vocab", what each of so many devices has."""
        counts = {
            "heads": (self.num_heads,),
            "kv_heads": (self.num_kv_heads,),
            "mlp": (self.mlp_hidden,),
            "shared": (self.shared_hidden,),
            "experts": (self.num_experts, self.expert_hidden),
            "vocab": (self.vocab_size,),
        }
        if any(count % num_devices == 0 for count in counts.get(part, ())):
            return 1 / num_devices
        # A KV head may be held by several devices, which share its query heads.
        if part == "kv_heads" and num_devices % self.num_kv_heads == self.num_heads % num_devices == 0:
            return 1 / self.num_kv_heads
        return 1.0

    @property
    def head_weights(self) -> int:
        """Of the projection onto the vocabulary."""
        return self.vocab_size * self.hidden

    @property
    def num_weights(self) -> int:
        """All that lie in memory; norms are too small to count."""
        return self.layer_weights + self.head_weights * (1 if self.tied_embeddings else 2)


def _latent_of(fields: JsonFields) -> LatentShape | None:
    """Latent attention, of a model that has it."""
    if not fields.any("kv_lora_rank", None):
        return None
    return LatentShape(
        q_rank=fields.any("q_lora_rank", None) or 0,
        kv_rank=fields.integer("kv_lora_rank", 1),
        nope=fields.integer("qk_nope_head_dim", 1),
        rope=fields.integer("qk_rope_head_dim", 1),
        value=fields.integer("v_head_dim", 1),
    )


def _experts_of(fields: JsonFields) -> dict[str, int]:
    """The fields of `ModelShape` about experts; none of a dense model."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    name = next((name for name in names if fields.any(name, None)), None)
    if name is None:
        return {}
    layers, dense = range(fields.integer("num_hidden_layers", 1)), fields.any("mlp_only_layers", None) or []
    step, first = fields.any("decoder_sparse_step", None) or 1, fields.any("first_k_dense_replace", None) or 0
    inner = "moe_intermediate_size" if fields.any("moe_intermediate_size", None) else "intermediate_size"
    width = fields.integer(inner, 1)
    return {
        "num_expert_layers": sum(i >= first and i not in dense and (i + 1) % step == 0 for i in layers),
        "num_experts": fields.integer(name, 1),
        "num_chosen": fields.integer("num_experts_per_tok", 1),
        "expert_hidden": width,
        "shared_hidden": width * (fields.any("n_shared_experts", None) or 0),
    }


class RooflineCost:
    """See the module.

    Args:
      chip: one device.
      shape: the model.
      num_chips: that share it.
      weight_bits, kv_bits: of one number.
      compute_efficiency, memory_efficiency: shares of the peaks that are reached, in (0, 1].
      overhead_s: of every iteration, however many decode steps it has.
      host_bandwidth: bytes per second between one device and the host, one way.
      page_size: tokens of a swapped page.
      num_groups: groups of layers that have pages of their own.

    Raises:
      ValueError: no chip, or an efficiency above 1.
    """

    def __init__(
        self,
        chip: Chip,
        shape: ModelShape,
        *,
        num_chips: int = 1,
        weight_bits: int = 16,
        kv_bits: int = 16,
        compute_efficiency: float = 0.6,
        memory_efficiency: float = 0.8,
        overhead_s: float = 5e-4,
        host_bandwidth: float = 25e9,
        page_size: int = 16,
        num_groups: int = 1,
    ) -> None:
        for name, share in (("compute_efficiency", compute_efficiency), ("memory_efficiency", memory_efficiency)):
            if not 0.0 < share <= 1.0:
                raise ValueError(f"{name} is {share}; it must be in (0, 1]")
        if num_chips < 1:
            raise ValueError(f"tensor_parallel_size is {num_chips}; it must be an integer of at least 1")
        self.chip, self.shape, self.num_chips = chip, shape, num_chips
        self._flops = chip.peak_flops * compute_efficiency
        self._bandwidth = chip.bandwidth * memory_efficiency
        self._overhead_s = overhead_s
        self._host_bandwidth = host_bandwidth
        self._weight_bytes = weight_bits / 8
        self._head_weights = shape.head_weights * shape.share("vocab", num_chips)
        embedding = 0.0 if shape.tied_embeddings else self._head_weights
        self.held_bytes = (
            self._on_device(shape.parts(shape.num_experts)) + self._head_weights + embedding
        ) * self._weight_bytes
        """Bytes of all weights on one device."""
        own_kv_heads = shape.num_kv_heads * shape.share("kv_heads", num_chips)
        numbers = 2 * shape.head_dim if shape.latent is None else shape.latent.row
        head_bytes = shape.num_layers * numbers * kv_bits / 8
        self.moved_token_bytes = shape.num_kv_heads * head_bytes
        """Bytes of one token's K and V, held once: what goes from one engine to another."""
        self.kv_token_bytes = own_kv_heads * head_bytes
        """Bytes of one token's K and V on one device."""
        # One KV head that every device has leaves the query heads to be shared.
        splits = own_kv_heads < shape.num_kv_heads or shape.num_kv_heads == 1
        own_heads = shape.num_heads * (shape.share("heads", num_chips) if splits else 1.0)
        dims = 2 * shape.head_dim if shape.latent is None else shape.latent.row + shape.latent.kv_rank
        self._attention_flops = 2 * shape.num_layers * own_heads * dims
        # Groups are of one size: the last may have places that no layer takes.
        layers_per_group = -(-shape.num_layers // num_groups)
        self._group_token_bytes = self.kv_token_bytes * layers_per_group / shape.num_layers
        self._page_bytes = page_size * self._group_token_bytes

    def step_s(self, features: StepFeatures) -> float:
        """Overhead, the longer of both, and the way to the host."""
        overhead_s = self._overhead_s * features.dispatches
        return overhead_s + max(self.compute_s(features), self.memory_s(features)) + self._swap_s(features)

    def num_pages(self, page_size: int, memory_fraction: float) -> int:
        """KV pages that fit beside the weights, the null page included.

        Raises:
          ValueError: the weights leave no room, or the fraction is not in (0, 1].
        """
        check_page_size(page_size)
        if not 0.0 < memory_fraction <= 1.0:
            raise ValueError(f"memory_fraction is {memory_fraction}; it must be in (0, 1]")
        room = self.chip.memory_bytes * memory_fraction - self.held_bytes
        pages = int(room // (page_size * self._group_token_bytes))
        if pages < 2:
            raise ValueError(
                f"weights take {self.held_bytes / 1e9:.1f} GB of each {self.chip.name}, which has"
                f" {self.chip.memory_bytes * memory_fraction / 1e9:.1f} GB (memory_fraction {memory_fraction:g});"
                " raise tensor_parallel_size, or choose a smaller model or weight_bits"
            )
        return pages

    def explain(self, features: StepFeatures) -> list[str]:
        """The arithmetic with its numbers."""
        shape, chip = self.shape, self.chip
        tokens, attended = _tokens(features), features.decode_context + features.prefill_attention
        read = features.decode_context + features.prefill_context
        compute_s, memory_s = self.compute_s(features), self.memory_s(features)
        return [
            f"{self.num_chips} x {chip.name}, each {self._flops / 1e12:.0f} TFLOP/s and"
            f" {self._bandwidth / 1e9:.0f} GB/s after efficiency",
            f"weights: {shape.num_weights / 1e9:.3f} billion, {self.held_bytes / 1e9:.2f} GB per device;"
            f" K/V: {self.kv_token_bytes:.0f} bytes per token and device",
            f"FLOPs per device: 2 x {self._token_weights:.0f} x {tokens} tokens"
            f" + 2 x {self._head_weights:.0f} x {features.emitted} sampled"
            f" + {self._attention_flops:.0f} x {attended} attended = {self._flops_of(features):.3e}",
            f"bytes per device: {self._read_bytes(features):.3e} weights + {self.kv_token_bytes:.0f} x"
            f" ({read} read + {tokens} written) = {self._bytes_of(features):.3e}",
            f"compute {compute_s:.3e} s, memory {memory_s:.3e} s: bound by"
            f" {'compute' if compute_s > memory_s else 'memory'}; with overhead {self._overhead_s:.1e} s"
            f" and {self._swap_s(features):.1e} s of swaps together {self.step_s(features):.3e} s",
        ]

    @property
    def _token_weights(self) -> float:
        return self._on_device(self.shape.parts(self.shape.num_chosen))

    def _on_device(self, parts: dict[str, float]) -> float:
        return sum(count * self.shape.share(part, self.num_chips) for part, count in parts.items())

    def _flops_of(self, features: StepFeatures) -> float:
        return (
            2 * self._token_weights * _tokens(features)
            + 2 * self._head_weights * features.emitted
            + self._attention_flops * (features.decode_context + features.prefill_attention)
        )

    def _bytes_of(self, features: StepFeatures) -> float:
        moved = features.decode_context + features.prefill_context + _tokens(features)
        return self._read_bytes(features) + self.kv_token_bytes * moved

    def _read_bytes(self, features: StepFeatures) -> float:
        experts = self.shape.experts_read(_tokens(features))
        return (self._on_device(self.shape.parts(experts)) + self._head_weights) * self._weight_bytes

    def compute_s(self, features: StepFeatures) -> float:
        """Seconds of the arithmetic alone."""
        return self._flops_of(features) / self._flops

    def memory_s(self, features: StepFeatures) -> float:
        """Seconds of the memory traffic alone."""
        return self._bytes_of(features) / self._bandwidth

    def _swap_s(self, features: StepFeatures) -> float:
        return features.swapped_pages * self._page_bytes / self._host_bandwidth


def _tokens(features: StepFeatures) -> int:
    return features.decode_rows + features.prefill_tokens

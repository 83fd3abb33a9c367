"""Sizing: bytes per device by arithmetic, and what of them fits. No compiler takes part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.core import MAX_LOGPROBS
from jaxserve.engine.dry_run import abstract_params_on
from jaxserve.engine.validation import context_length
from jaxserve.loading import abstract_weights_of
from jaxserve.models import ModelConfig, axis_size, partition_spec
from jaxserve.plan.targets import Slice, slices_of
from jaxserve.runtime import EngineShapes, format_bytes, keeps_packed, weight_dtype
from jaxserve.tables import Bucket, TableLayout


@dataclass(frozen=True, slots=True)
class Sizing:
    """A model under an engine's settings on a slice.

    Attributes:
      where: the slice.
      shapes: of the engine, on a mesh of absent devices or of ones that can be compiled for.
      step_bytes: temporary and output bytes of the largest step on one device.
    """

    where: Slice
    shapes: EngineShapes
    step_bytes: int

    @property
    def allowed_bytes(self) -> int:
        """Of one device's memory."""
        return int(self.where.chip.memory_bytes * self.shapes.config.memory_fraction)

    @property
    def left_bytes(self) -> int:
        """For pages; below 0 if what comes before them does not fit."""
        shapes = self.shapes
        return self.allowed_bytes - shapes.weights_bytes - shapes.state_bytes - self.step_bytes

    @property
    def page_bytes(self) -> int:
        """Of a page on one device."""
        return self.shapes.kv.bytes_on_a_device(1)

    @property
    def needed_pages(self) -> int:
        """For one request of `max_model_len`, and the null page."""
        return self.shapes.limits.most_pages_per_seq + 1

    @property
    def missing_bytes(self) -> int:
        """On each device, until one request of `max_model_len` can run; 0: it fits."""
        return max(0, self.needed_pages * self.page_bytes - self.left_bytes)

    @property
    def fitting_pages(self) -> int:
        """Pages that memory has room for, the null page included; 0 where an engine would not start."""
        pages = self.left_bytes // self.page_bytes
        return pages if pages >= 2 else 0

    @property
    def pages(self) -> int:
        """Pages of the pool, as the engine would have them: no more than the slots can use."""
        return min(self.fitting_pages, self.shapes.most_pages)

    @property
    def kv_token_bytes(self) -> int:
        """Of one token's K and V, scales included, in all layers; held once."""
        kv = self.shapes.kv
        return kv.page_bytes * len(kv.groups.windows) // kv.page_size

    @property
    def own_kv_token_bytes(self) -> int:
        """The same on one device."""
        kv = self.shapes.kv
        return self.page_bytes * len(kv.groups.windows) // kv.page_size

    @property
    def fitting_tokens(self) -> int:
        """Tokens whose K and V memory has room for at once, where none of them is given back."""
        kv = self.shapes.kv
        return max(0, self.fitting_pages - 1) // len(kv.groups.windows) * kv.page_size


def engine_shapes(model: ModelConfig, config: EngineConfig, mesh: Mesh) -> EngineShapes:
    """What the settings come to on the devices of a mesh.

    Raises:
      ValueError: settings that do not fit the model or the devices.
    """
    if mesh.devices.flat[0].platform == "gpu" and model.latent is None:
        # What "auto" comes to on Hopper; it would ask a GPU of this machine.
        config = replace(config, attention_implementation="mosaic_gpu")
    packed = keeps_packed(config, mesh)
    loaded = abstract_weights_of(model, config.dtype, config.quantization, weight_dtype(config, mesh), packed=packed)
    params = abstract_params_on(mesh, model, config, loaded)
    return EngineShapes.of(
        model, params, config, context_length(model.max_position_embeddings, config.max_model_len), mesh
    )


def sizing_of(where: Slice, model: ModelConfig, config: EngineConfig, step_bytes: int | None = None) -> Sizing:
    """By arithmetic alone.

    Args:
      step_bytes: of the largest step, where it is known; else `estimated_step_bytes`.

    Raises:
      ValueError: as `engine_shapes`.
    """
    shapes = engine_shapes(model, config, where.absent_mesh(config.tensor_parallel_size, model))
    return Sizing(where, shapes, estimated_step_bytes(shapes) if step_bytes is None else step_bytes)


def estimated_step_bytes(shapes: EngineShapes) -> int:
    """Temporary and output bytes of the largest step, where no compiler tells them: a rule of thumb.

    Of each token, in the weights' dtype: the residual twice, query, key and value heads, and two inner widths of the
    MLP, of a mixture those of the chosen experts. Then the logits, once more for each step ahead, and the scores of
    prompt tokens.
    """
    model, mesh = shapes.model_config, shapes.kv.mesh
    bucket, wide = shapes.buckets.all()[-1], 4 if shapes.config.dtype == "float32" else 2

    def own(count: int, axis: str) -> int:
        spec = partition_spec(model, (axis,), mesh)
        return count if spec[0] is None else -(-count // axis_size(mesh, spec[0]))

    inner = own(model.intermediate_size, "mlp")
    if (experts := model.experts) is not None:
        inner = max(inner, experts.num_chosen * experts.inner_size)
    heads = own(model.num_heads, "heads") + 2 * own(model.num_kv_heads, "kv_heads")
    tokens = bucket.decode_rows + bucket.prefill_tokens
    temporary = tokens * wide * (2 * model.hidden_size + heads * model.head_dim + 2 * inner)
    logits = 4 * bucket.sample_rows * own(model.vocab_size, "vocab")
    scores = bucket.prefill_tokens * 8 * (1 + min(MAX_LOGPROBS, model.vocab_size))
    return temporary + (1 + shapes.limits.max_steps_ahead) * (logits + scores)


def planned_argument_bytes(shapes: EngineShapes, bucket: Bucket, num_pages: int) -> int:
    """Bytes of a step's arguments on one device: weights, pool, each slot's last token, the tables of the bucket."""
    ints = TableLayout(bucket, False, len(shapes.kv.groups.windows)).int_size
    slots = shapes.config.max_num_seqs + 1
    return shapes.weights_bytes + shapes.kv.bytes_on_a_device(num_pages) + 4 * (slots + ints)


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that makes a model fit.

    Attributes:
      flags: to set.
      says: what it comes to.
    """

    flags: str
    says: str


def remedies(sizing: Sizing) -> list[Remedy]:
    """What would make it fit, by arithmetic, with the step's memory as it is: formats, slices, lengths, slots.

    A larger slice is named for the settings as they are, and for 8-bit forms where they do with a smaller one.
    """
    where, config, model = sizing.where, sizing.shapes.config, sizing.shapes.model_config
    found: list[Remedy] = []

    def tried_on(there: Slice, changes: dict[str, Any]) -> Sizing | None:
        size = config.tensor_parallel_size if there == where else there.num_chips
        try:
            return sizing_of(there, model, replace(config, **changes, tensor_parallel_size=size), sizing.step_bytes)
        except ValueError:
            return None  # these settings cannot be on these devices

    forms: list[dict[str, Any]] = [{}]
    narrow, small = {"quantization": "int8_channel"}, {"kv_cache_dtype": "int8"}
    forms += [narrow] * (config.quantization is None) + [small] * (config.kv_cache_dtype == "auto")
    forms += [narrow | small] * (len(forms) == 3)
    most = slices_of(where.kind)[-1].num_chips + 1
    for changes in forms:
        for there in slices_of(where.kind):
            if not where.num_chips <= there.num_chips < most:
                continue
            tried = tried_on(there, changes)
            if tried is not None and not tried.missing_bytes:
                found.append(Remedy(_as_flags(where, there, changes), _comes_to(tried)))
                most = there.num_chips if there != where else most
                break
    for changes in forms:
        tried = tried_on(where, changes)
        if tried is not None and tried.missing_bytes and tried.fitting_tokens >= 2:
            shorter = changes | {"max_model_len": tried.fitting_tokens}
            found.append(Remedy(_as_flags(where, where, shorter), "one request of this length at a time"))
            break
    if config.max_num_seqs > 1:
        tried = tried_on(where, {"max_num_seqs": 1})
        if tried is not None and not tried.missing_bytes:
            found.append(Remedy("--max_num_seqs=1", _comes_to(tried)))
    return found


def _as_flags(where: Slice, there: Slice, changes: dict[str, Any]) -> str:
    target = [f"--target={there.name}"] * (there != where)
    return " ".join([*target, *(f"--{name}={value}" for name, value in changes.items())])


def _comes_to(sizing: Sizing) -> str:
    weights = format_bytes(sizing.shapes.weights_bytes)
    return f"weights {weights} per device, {sizing.fitting_tokens:,} tokens of KV"

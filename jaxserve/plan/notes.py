"""What is worth knowing of a plan, in sentences: what devices have whole, what stands idle."""

from __future__ import annotations

from jaxserve.models import kv_copies
from jaxserve.plan.sizing import Sizing
from jaxserve.runtime import format_bytes


def notes_on(sizing: Sizing) -> list[str]:
    """In the order of how much they cost."""
    model, config, where = sizing.shapes.model_config, sizing.shapes.config, sizing.where
    size, found = config.tensor_parallel_size, list[str]()
    if size > 1 and model.num_kv_heads % size:
        heads = f"{model.num_kv_heads} KV head{'s' * (model.num_kv_heads > 1)}"
        what = f"{format_bytes(sizing.own_kv_token_bytes)} of a token, instead of 1/{size} of it"
        if (copies := kv_copies(model, size)) > 1:
            found.append(
                f"{heads} on {size} devices: KV pages, and the key and value matrices, are replicated, each head is"
                f" held by {copies} devices: {what}."
            )
        elif model.latent is not None:
            found.append(f"Latent attention keeps one row per token, which each of the {size} devices has: {what}.")
        else:
            found.append(
                f"{heads} do not divide among {size} devices: KV pages, and the key and value matrices, are replicated,"
                f" so each device holds {what}" + ("." if model.num_kv_heads == 1 else ", and attends for all heads.")
            )
    sizes = {"query heads": model.num_heads, "tokens of the vocabulary": model.vocab_size}
    if "experts" not in model.mlp_kinds or len(set(model.mlp_kinds)) > 1:
        sizes["columns of the MLP"] = model.intermediate_size
    found += [
        f"{count} {what} do not divide among {size} devices: these weights are replicated."
        for what, count in sizes.items()
        if size > 1 and count % size
    ]
    if size > 1 and model.experts is not None and model.experts.split(size) is None:
        found.append(f"Neither experts nor their inner width divide among {size} devices: all experts are replicated.")
    if size < where.num_chips:
        found.append(f"{where.num_chips - size} of {where.num_chips} devices stand idle (tensor_parallel_size).")
    if sizing.pages < sizing.fitting_pages:
        found.append(
            f"Memory has room for {sizing.fitting_pages:,} pages; {config.max_num_seqs} slots (max_num_seqs) of"
            f" {sizing.shapes.limits.max_model_len:,} tokens can use {sizing.pages:,}."
        )
    if where.num_hosts > 1:
        found.append(f"{where.num_hosts} hosts run one program over a mesh of all devices.")
    return found

"""What two servers must have alike, and which flags go together."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config.disaggregation_flags import check_disaggregation
from jaxserve.disaggregation.kv_layout import _fingerprint
from jaxserve.disaggregation.transports import chooses_jax
from jaxserve.models import model_config_from_hf
from tests.models.tiny_models import FOLDER

WEIGHTS = np.arange(1, 25, dtype=np.float32).reshape(4, 6)


def params(*, stacked: bool = False, **projections: np.ndarray) -> dict[str, Any]:
    """Two layers with those projections in the first."""
    projections = {"k_proj": WEIGHTS, "v_proj": -WEIGHTS} | projections
    layers: Any = [
        {"attention": {name: {"kernel": jnp.array(array + number)} for name, array in projections.items()}}
        for number in range(2)
    ]
    if stacked:
        arrays = {name: np.stack([projections[name] + number for number in range(2)]) for name in projections}
        layers = {"attention": {name: {"kernel": jnp.array(array)} for name, array in arrays.items()}}
    return {"final_norm": jnp.ones(4), "layers": layers}


def test_the_fingerprint_tells_projections_apart_and_not_their_form() -> None:
    config = model_config_from_hf(json.loads((FOLDER / "llama_gqa_tied" / "config.json").read_text()))
    plain = _fingerprint(config, params())
    assert _fingerprint(config, params(stacked=True)) == plain
    # Packed in another order, with zeros.
    assert _fingerprint(config, params(k_proj=np.pad(WEIGHTS.T.reshape(2, 12), 1))) == plain
    for name in ("k_proj", "v_proj"):
        changed = {name: np.where(WEIGHTS == 9, 9.5, WEIGHTS).astype(np.float32) * (1 if name == "k_proj" else -1)}
        assert _fingerprint(config, params(**changed)) != plain
        assert _fingerprint(config, params(stacked=True, **changed)) == _fingerprint(config, params(**changed))


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_jax_needs_an_address_that_can_be_told(role: str, host: str) -> None:
    workers = (("10.0.0.5", 8100),) if role == "decode" else ()
    flags: Any = SimpleNamespace(disaggregation=role, prefill_workers=workers, kv_host=host, kv_transfer="jax")
    with pytest.raises(ValueError, match=rf"kv_host is {host} and kv_transfer is jax"):
        check_disaggregation(flags, "a token of the tests")
    flags.kv_transfer = "auto"
    check_disaggregation(flags, "a token of the tests")


@pytest.mark.parametrize(("transport", "by_jax"), [("auto", False), ("stream", False), ("jax", True)])
def test_jax_is_only_where_it_is_asked_for(transport: str, by_jax: bool) -> None:
    accelerator: Any = SimpleNamespace(
        mesh=SimpleNamespace(size=1, devices=np.array([SimpleNamespace(platform="tpu")], object))
    )
    assert chooses_jax(transport, accelerator) is by_jax
    accelerator.mesh.size = 2
    if by_jax:
        with pytest.raises(ValueError, match="the model is on several devices"):
            chooses_jax(transport, accelerator)

"""Plans with steps compiled for targets that this machine lacks: the compiler's bytes are the planned ones."""

import pytest

from jaxserve.plan.targets import find_slice
from pallas_kernels.common.deviceless import missing
from tests.plan.models import plan_for, write_config

TPU, GPU = pytest.mark.tpu_compile, pytest.mark.gpu_compile


def compiled_plan(model, target, **settings):
    if reason := missing(find_slice(target).compile_target):
        pytest.skip(reason)
    plan = plan_for(model, target, compiles=True, **settings)
    assert plan.compiled is not None, plan.why_not_compiled
    for step in plan.steps:
        assert abs(step.difference) < 0.05, step
        assert all(each.trips_known for each in step.collectives)
    return plan


@pytest.mark.parametrize(
    "target", [pytest.param("v5e-4", marks=TPU), pytest.param("v6e-8", marks=TPU), pytest.param("h200x2", marks=GPU)]
)
def test_a_small_model_takes_the_bytes_that_were_planned(tmp_path, target):
    plan = compiled_plan(write_config(tmp_path), target, max_num_seqs=8, max_model_len=512, max_num_batched_tokens=64)
    sent = [each for each in plan.compiled.decode.collectives if not each.conditional]
    # Two of each layer, and the embedding's.
    assert sum(each.count for each in sent if each.kind == "all-reduce") == 2 * 3 + 1
    assert plan.as_dict()["activations_are"] == "compiled"
    largest = plan.compiled.mixed
    assert plan.sizing.step_bytes >= largest.temp_bytes + 2 * largest.output_bytes  # the step ahead leaves its own


@TPU
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "target", "layers"),
    [("llama-3.1-70b", "v5e-16", 80), ("llama-3.1-70b", "v6e-8", 80), ("llama-3.1-8b", "v5e-4", 32)],
)
def test_a_large_model_takes_the_bytes_that_were_planned(model, target, layers):
    plan = compiled_plan(model, target)
    sent = [each for each in plan.compiled.decode.collectives if each.kind == "all-reduce" and not each.conditional]
    assert sum(each.count for each in sent) == 2 * layers + 1


@TPU
@pytest.mark.slow
def test_a_mixture_takes_the_bytes_that_were_planned():
    compiled_plan("qwen3-30b-a3b", "v6e-4")

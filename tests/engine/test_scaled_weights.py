"""Quantised weights as plain arrays with scales: any devices, stacked layers, XLA's products on one CPU device."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from jaxserve import LLM
from jaxserve.config import EngineConfig
from jaxserve.engine.dry_run import start_plan
from jaxserve.loading.quantised_weights import abstract_params_of, quantised_forms
from jaxserve.models import leaf_shardings, make_params, weights
from jaxserve.runtime import weights_form
from jaxserve.testing.tiny import tiny_config, tiny_weights, write_tiny_model
from jaxserve.testing.tiny_lora import write_tiny_lora
from pallas_kernels.matmul import QuantisedForm, ScaledForm, ScaledMatrix, abstract_scaled, num_bytes, scaled_form
from tests.engine.conftest import greedy, ids, random_prompts
from tests.engine.test_cpu_kernels import MODEL, form
from tests.engine.test_quantization import scores, through
from tests.loading.gguf_files import write_gguf
from tests.models.tiny_models import FOLDER

SIZES = dict(vocab=288, hidden_size=64, intermediate_size=256, head_dim=32)
"""Every matrix is in blocks of 32, and the MLP's inner blocks divide by 8."""
PROMPTS = random_prompts((5, 16, 17, 33))
XLA = {"matmul_implementation": "xla"}
CHANNELS = ("int8_channel", "fp8")
SETTINGS = dict(
    dtype="float32", compile_cache="", skip_tokenizer_init=True, max_model_len=64, max_num_batched_tokens=64,
    decode_buckets=(8,), prefill_buckets=(64,), table_width_buckets=(4,), num_pages=40,
)  # fmt: skip

DEVICES = """
import json, sys
from jaxserve import LLM, SamplingParams
model, devices, settings = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
found = {}
for name in sys.argv[4:]:
    llm = LLM(model, quantization=name, tensor_parallel_size=devices, matmul_implementation="xla", **settings)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([[1, 2, 3], list(range(40))], params, use_tqdm=False)
    layers = llm.engine.runner.params["layers"]
    kernel = (layers[0] if isinstance(layers, list) else layers)["mlp"]["down_proj"]["kernel"]
    held = [leaf.addressable_shards[0].data.shape for leaf in kernel if leaf is not None]
    plan = llm.engine.runner.memory_plan.weights_bytes
    found[name] = [[o.outputs[0].token_ids for o in outputs], held, plan]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """`make(quantization, **settings)`: an LLM on a tiny model, or its GGUF file with `file`."""
    folder = tmp_path_factory.mktemp("scaled")
    config = tiny_config(**SIZES)
    write_tiny_model(folder / "plain", **SIZES)
    write_gguf(folder / "Q4_1.gguf", config, tiny_weights(config), quant=Quant.Q4_1)
    made = {}

    def make(quantization, file="plain", **settings):
        key = quantization, file, *map(str, sorted(settings.items()))
        if key not in made:
            made[key] = LLM(str(folder / file), quantization=quantization, **(SETTINGS | settings))
        return made[key]

    make.folder = folder
    return make


def generated(llm):
    llm.engine.reset_prefix_cache()
    return ids(llm.generate(PROMPTS, greedy(8), use_tqdm=False))


def kernel_of(llm):
    layers = llm.engine.runner.params["layers"]
    return (layers[0] if isinstance(layers, list) else layers)["mlp"]["down_proj"]["kernel"]


@pytest.mark.parametrize(("quantization", "file"), [("int8", "plain"), ("int4", "plain"), ("gguf", "Q4_1.gguf")])
@pytest.mark.parametrize("settings", [XLA, {"scan_layers": True}], ids=["xla", "stacked"])
def test_answers_are_those_of_native_products(make, quantization, file, settings):
    """The numbers are the same, so only the order of sums is another."""
    wanted, llm = make(quantization, file), make(quantization, file, **settings)
    assert isinstance(kernel_of(llm), ScaledMatrix)
    assert not isinstance(kernel_of(wanted), ScaledMatrix)
    assert isinstance(llm.engine.runner.params["embed"], ScaledMatrix)
    np.testing.assert_allclose(scores(llm), scores(wanted), atol=1e-4)
    assert generated(llm) == generated(wanted)


@pytest.mark.parametrize("quantization", CHANNELS)
def test_stacked_layers_give_the_answers_of_single_ones(make, quantization):
    """On one CPU device too, which has no native products with scales per column."""
    wanted, llm = make(quantization), make(quantization, scan_layers=True)
    assert isinstance(kernel_of(wanted), ScaledMatrix)
    np.testing.assert_allclose(scores(llm), scores(wanted), atol=1e-4)
    assert generated(llm) == generated(wanted)


def test_finer_numbers_are_nearer_to_float32(make):
    """Mean differences of log-probabilities: 8 bits by blocks, by columns, fp8's 3 bits of fraction, 4 bits."""
    exact = np.asarray(scores(make(None)))
    names = ("int8", "int8_channel", "fp8", "int4")
    found = [np.abs(np.asarray(scores(make(name, **XLA))) - exact).mean() for name in names]
    assert 1e-4 < found[0] < found[1] < found[2] < found[3], dict(zip(names, found, strict=True))
    assert found[1] < 0.05
    assert found[2] < 0.3


def test_bfloat16_activations_leave_int8_near_float32(make):
    exact = np.asarray(scores(make(None)))
    for name in ("int8", "int8_channel"):
        assert 1e-3 < np.abs(np.asarray(scores(make(name, dtype="bfloat16", **XLA))) - exact).mean() < 0.1


@pytest.mark.parametrize("quantization", ["int8", "int4", *CHANNELS])
def test_the_plan_counts_the_bytes_of_numbers_and_scales(make, quantization):
    llm = make(quantization, **XLA)
    held = sum(num_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(llm.engine.runner.params))
    assert llm.engine.runner.memory_plan.weights_bytes == held
    assert start_plan(llm.engine.config).memory.weights_bytes == held
    dense = sum(leaf.nbytes for leaf in jax.tree.leaves(make(None, **XLA).engine.runner.params))
    assert held < {"int8": 8.8, "int4": 6.0, "int8_channel": 9.2, "fp8": 9.2}[quantization] / 32 * dense


@pytest.mark.parametrize(
    ("scan_layers", "names"),
    [
        pytest.param(False, ("int4", "int8_channel"), id="single"),
        pytest.param(True, ("int8", "fp8"), id="stacked", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_the_same_on_1_2_and_4_devices(make, scan_layers, names):
    found = {}
    for devices in (1, 2, 4):
        env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
        settings = json.dumps(SETTINGS | {"scan_layers": scan_layers})
        command = [sys.executable, "-c", DEVICES, str(make.folder / "plain"), str(devices), settings, *names]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
        found[devices] = json.loads(done.stdout)
    layers = [2] if scan_layers else []
    for name in names:
        assert found[1][name][0] == found[2][name][0] == found[4][name][0], name
        assert found[4][name][2] < 0.4 * found[1][name][2]
        blocks = [8, 64] if name in ("int8", "int4") else [1, 64]
        for devices in (1, 4):
            scales = [blocks[0] // devices, 64] if blocks[0] > 1 else blocks
            wanted = [[*layers, 256 // devices, 64], [*layers, *scales]]
            assert found[devices][name][1][:2] == wanted, (name, devices)


def test_scales_are_sharded_as_numbers_and_neither_where_blocks_do_not_divide():
    mesh = AbstractMesh((1, 4), ("data", "model"))
    rows, columns = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("model", None), (None, "model")))

    def specs(shape, form, sharding):
        return [each and tuple(each.spec) for each in leaf_shardings(sharding, abstract_scaled(shape, form))]

    blocks = scaled_form(QuantisedForm(8))
    assert specs((256, 64), blocks, rows) == [("model", None), ("model", None), None]
    assert specs((192, 64), blocks, rows) == [(None, None), (None, None), None]
    assert specs((192, 64), blocks, columns) == [(None, "model"), (None, "model"), None]
    assert specs((192, 64), ScaledForm("int8"), rows) == [("model", None), (None, None), None]
    minima = scaled_form(QuantisedForm(4, has_minimum=True))
    assert specs((256, 64), minima, rows)[2] == ("model", None)
    assert leaf_shardings(rows, jax.ShapeDtypeStruct((4, 4), jnp.float32)) == rows


def test_adapters_are_added_to_products_of_quantised_weights(make, tmp_path):
    adapter = write_tiny_lora(tmp_path / "adapter", make.folder / "plain")

    def answers(**settings):
        llm = make("int8", enable_lora=True, max_loras=1, **settings)
        llm.load_lora_adapter("a", str(adapter))
        found = ids(llm.generate(PROMPTS, greedy(8), use_tqdm=False, lora="a"))
        assert found != ids(llm.generate(PROMPTS, greedy(8), use_tqdm=False))
        llm.unload_lora_adapter("a")
        return found

    assert answers(**XLA) == answers(scan_layers=True) == answers()


def loaded(quantization, model=MODEL, **changed):
    """Shapes of a model's weights for XLA; `changed` has the form of matrices of the last layer's MLP."""
    forms = quantised_forms(quantization, model, weights(model), None, packed=False)
    for name, other in changed.items():
        forms["layers", model.num_layers - 1, "mlp", name, "kernel"] = other
    return make_params(model, lambda weight: abstract_params_of(weight, forms, "float32"))


def on_gpu(quantization, capability, shapes):
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    mesh = SimpleNamespace(devices=np.asarray([device]), size=1)
    return weights_form(EngineConfig(model="m", quantization=quantization), mesh, MODEL, shapes)


def test_accelerators_stack_quantised_layers():
    assert form("tpu", quantization="int4", loaded=loaded("int4")) == "stacked"
    assert form("tpu", quantization="int8", devices=4, loaded=loaded("int8"), scan_layers=False) == "plain"
    assert form("cpu", quantization="int8", devices=2, loaded=loaded("int8")) == "plain"
    assert on_gpu("fp8", "9.0", loaded("fp8")) == "stacked"


def test_what_a_gpu_cannot_have_is_refused():
    with pytest.raises(ValueError, match=r"fp8 needs a GPU of compute capability 8\.9; this one has 8\.0: use int8"):
        on_gpu("fp8", "8.0", loaded("fp8"))
    with pytest.raises(ValueError, match=r"quantization int4 keeps numbers of 4 bits, which XLA copies .* on a GPU"):
        on_gpu("int4", "9.0", loaded("int4"))


def test_layers_of_several_forms_are_not_stacked(caplog):
    model = replace(MODEL, num_layers=2, sliding_windows=(), layer_ropes=(), mlp_kinds=())
    shapes = loaded("int8", model, down_proj=scaled_form(QuantisedForm(4)))
    with caplog.at_level("INFO", "jaxserve"):
        assert form("tpu", model=model, quantization="int8", loaded=shapes) == "plain"
    assert "the matrices of layer 1 have other forms" in caplog.text
    with pytest.raises(ValueError, match="scan_layers: the matrices of layer 1 have other forms"):
        form("tpu", model=model, quantization="int8", loaded=shapes, scan_layers=True)


@pytest.mark.parametrize("quantization", CHANNELS)
@pytest.mark.parametrize("setting", ["matmul_implementation", "decoder_implementation"])
def test_scales_per_column_have_no_native_products(quantization, setting):
    with pytest.raises(ValueError, match=f"quantization {quantization} has no native products: use {setting} auto or"):
        form(quantization=quantization, loaded=loaded(quantization), **{setting: "native_cpu"})


def prompt_scores(path, prompt, quantization, **settings):
    llm = LLM(str(path), quantization=quantization, **(SETTINGS | {"matmul_implementation": "xla"} | settings))
    output = llm.generate([prompt], greedy(1, prompt_logprobs=0), use_tqdm=False)[0]
    found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
    return np.asarray(found), llm.engine.runner.params


@pytest.mark.parametrize(
    ("name", "scan_layers"),
    [("gemma3_dual_rope", False), ("mixtral_moe", True), ("deepseek_v3_mla", False), ("qwen3_moe", False)],
)
def test_families_answer_as_from_the_same_numbers_in_float32(name, scan_layers, tmp_path):
    """Experts, norms after layers, latent attention: from a checkpoint of numbers that 8 bits hold exactly."""
    golden = json.loads((FOLDER / name / "golden.json").read_text())
    shutil.copytree(FOLDER / name, tmp_path / name)
    tensors = load_file(FOLDER / name / "model.safetensors")
    rounded = {
        key: through("embed", value, 8) if value.ndim == 2 and value.shape[1] % 32 == 0 else value
        for key, value in tensors.items()
    }
    save_file(rounded, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    prompt = golden["prompt_ids"]
    found, params = prompt_scores(tmp_path / name, prompt, "int8", scan_layers=scan_layers)
    wanted, _ = prompt_scores(tmp_path / name, prompt, None)
    np.testing.assert_allclose(found, wanted, atol=2e-4)
    difference = np.abs(found - golden["logprobs_of_prompt"][1:])
    assert 1e-4 < np.median(difference) < 0.1, "rounding moves the choice of experts at some positions, not at most"
    layers = params["layers"] if scan_layers else params["layers"][-1]
    mlp = layers[-1]["mlp"] if isinstance(layers, tuple) else layers["mlp"]
    if "experts" in mlp:
        assert mlp["experts"]["down_proj"]["kernels"].numbers.dtype == jnp.int8
        assert not isinstance(mlp["router"]["weight"], ScaledMatrix)

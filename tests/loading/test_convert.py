"""Conversions: there and back equal to the bit, what is served, what is refused, and what an early end leaves."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM, SamplingParams
from jaxserve.convert import Conversion, convert_checkpoint
from jaxserve.core import UnsupportedModelError
from jaxserve.loading import load_model, resolve_model
from jaxserve.loading.gguf_writer import differences
from jaxserve.loading.safetensors_reader import SafetensorsReader
from jaxserve.testing.tiny import write_tiny_model
from jaxserve.text import load_tokenizer
from tests.loading.gguf_families import write_family
from tests.models.tiny_models import FOLDER, NAMES, changed

IN_BFLOAT16 = [
    (name, "bfloat16") for name in ("deepseek_v3_mla", "llama_gqa_tied", "gemma2_softcap", "gpt_oss_sinks", "qwen3_moe")
]
NORMS_HOLD_ONE = ("gemma2_softcap", "gemma3_dual_rope")


def convert(model, output, **settings):
    kind = "gguf" if output.suffix == ".gguf" else settings.pop("format", "safetensors")
    return convert_checkpoint(Conversion(str(model), output, kind, **settings))


def load(path, dtype="float32"):
    return load_model(resolve_model(str(path)), dtype)


def tensors_of(path):
    reader = SafetensorsReader(path)
    return {name: np.array(reader.read(name)) for name in reader.names()}


def assert_same(one, other, atol=0.0):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        np.testing.assert_allclose(
            value.astype(np.float32), other[name].astype(np.float32), rtol=0, atol=atol, err_msg=name
        )


def in_bfloat16(target, name):
    """A tiny model with every tensor rounded, but for what is float32 in every model."""

    def rounded(tensors):
        return {
            key: value if key.endswith("e_score_correction_bias") else value.astype(ml_dtypes.bfloat16)
            for key, value in tensors.items()
        }

    return changed(target, name, tensors=rounded, torch_dtype="bfloat16")


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in NAMES), *IN_BFLOAT16])
def test_orbax_and_back_is_the_same_to_the_bit(tmp_path, name, dtype):
    source = FOLDER / name if dtype == "float32" else in_bfloat16(tmp_path / "source", name)
    there = convert(source, tmp_path / "there", format="orbax")
    back = convert(there, tmp_path / "back", max_shard_bytes=100_000)
    assert_same(tensors_of(source), tensors_of(back))
    for path in (there, back):
        assert not differences(load(source).config, load(path).config)
        assert load(path).config.eos_token_ids == load(source).config.eos_token_ids
    files = sorted(file.name for file in back.glob("*.safetensors"))
    assert len(files) > 1 and all((back / file).stat().st_size < 200_000 for file in files)


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in NAMES), *IN_BFLOAT16])
def test_gguf_and_back_is_the_same_to_the_bit(tmp_path, name, dtype):
    source = FOLDER / name if dtype == "float32" else in_bfloat16(tmp_path / "source", name)
    there = convert(source, tmp_path / "there.gguf")
    back = convert(there, tmp_path / "back", dtype=dtype)
    # A norm that holds 1 + w is rounded where it was made, in float32.
    assert_same(tensors_of(source), tensors_of(back), atol=2e-7 if name in NORMS_HOLD_ONE else 0)
    assert not differences(load(source).config, load(back).config)
    orbax = load(convert(there, tmp_path / "orbax", format="orbax", dtype=dtype))
    for one, other in zip(jax.tree.leaves(orbax.params), jax.tree.leaves(load(back).params), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_a_gguf_file_is_what_llama_cpps_converter_writes(tmp_path, name):
    """Tensors by the names, order and values that the gguf package's own map gives."""
    import gguf

    ours, theirs = convert(FOLDER / name, tmp_path / "o.gguf"), write_family(tmp_path / "t.gguf", FOLDER / name)
    found, wanted = ({t.name: t for t in gguf.GGUFReader(path).tensors} for path in (ours, theirs))
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].tensor_type == tensor.tensor_type
        np.testing.assert_allclose(found[key].data, tensor.data, rtol=1e-6, err_msg=key)
    ids = {"bos_token_id": None, "pad_token_id": None, "eos_token_ids": ()}  # of the tokenizer, which has none here
    assert dataclasses.replace(load(ours).config, **ids) == load(theirs).config


def greedy(path):
    golden = json.loads((FOLDER / path[0] / "golden.json").read_text())
    llm = LLM(
        str(path[1]),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        page_size=16,
        num_pages=9,
        prefill_buckets=(16,),
        decode_buckets=(1,),
        table_width_buckets=(8,),
    )
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return llm.generate([golden["prompt_ids"]], params, use_tqdm=False)[0].outputs[0].token_ids, golden["greedy_ids"]


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("llama3_rope", "m.gguf"),
        ("gpt_oss_sinks", "m.gguf"),
        ("mixtral_moe", "orbax"),
        ("deepseek_v3_mla", "orbax"),
        ("deepseek_v3_mla", "m.gguf"),
        ("phi3_fused", "safetensors"),
    ],
)
def test_what_is_converted_serves_the_same_ids(tmp_path, name, output):
    path = convert(FOLDER / name, tmp_path / output, **({} if "." in output else {"format": output}))
    found, wanted = greedy((name, path))
    assert found == wanted


def test_fused_experts_of_gguf_come_back_fused(tmp_path):
    there = convert(FOLDER / "gpt_oss_sinks", tmp_path / "there.gguf")
    back = convert(there, tmp_path / "back")
    assert "expert_tensors" not in json.loads((back / "config.json").read_text())
    assert_same(tensors_of(FOLDER / "gpt_oss_sinks"), tensors_of(back))


@pytest.mark.parametrize("output", ["safetensors", "orbax", "m.gguf"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_rounded_once(tmp_path, output, dtype):
    original = FOLDER / "deepseek_v3_mla"
    path = convert(original, tmp_path / output, dtype=dtype, **({} if "." in output else {"format": output}))
    back = tensors_of(convert(path, tmp_path / "back", dtype=dtype))
    for name, value in tensors_of(original).items():
        kind = np.float32 if name.endswith("e_score_correction_bias") else dtype
        np.testing.assert_array_equal(back[name], value.astype(kind), err_msg=name)
    assert dtype in json.loads((tmp_path / "back" / "config.json").read_text()).values()


def test_q8_0_is_what_the_gguf_package_makes_of_it(tmp_path):
    from gguf import GGMLQuantizationType as Quant
    from gguf.quants import dequantize, quantize

    path = convert(FOLDER / "qwen3_qknorm", tmp_path / "m.gguf", dtype="q8_0")
    name = "model.layers.1.mlp.up_proj.weight"
    value = tensors_of(FOLDER / "qwen3_qknorm")[name]
    found = load(path).params["layers"][1]["mlp"]["up_proj"]["kernel"]
    np.testing.assert_array_equal(found.T, dequantize(quantize(value, Quant.Q8_0), Quant.Q8_0))
    kept = load_model(resolve_model(str(path)), "float32", quantization="gguf")
    assert kept.params["layers"][1]["mlp"]["up_proj"]["kernel"].integers.dtype == np.int8


def test_numbers_beyond_float16_are_refused_naming_the_tensor(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"

    def large(tensors):
        tensors[name][0, 0] = 1e6
        return tensors

    source = changed(tmp_path / "source", "llama_gqa_tied", tensors=large)
    for settings in ({"format": "safetensors"}, {"format": "orbax"}, {}):
        output = tmp_path / ("out" if settings else "out.gguf")
        with pytest.raises(UnsupportedModelError, match=r"up_proj.weight has numbers beyond float16|ffn_up.weight has"):
            convert(source, output, dtype="float16", **settings)
        assert os.listdir(tmp_path) == ["source"]


CHAT = [{"role": "user", "content": "Is 12345 it's  a\n\nnumber? Café 😊"}]


@pytest.mark.parametrize("output", ["safetensors", "orbax", "m.gguf"])
def test_the_tokenizer_goes_along(tmp_path, tiny_model_dir, output):
    original = load_tokenizer(resolve_model(str(tiny_model_dir)))
    there = convert(tiny_model_dir, tmp_path / output, **({} if "." in output else {"format": output}))
    back = convert(there, tmp_path / "back")
    for path in (there, back):
        found = load_tokenizer(resolve_model(str(path)))
        assert found.encode_chat(CHAT) == original.encode_chat(CHAT)
        assert (found.bos_id, set(found.eos_ids)) == (original.bos_id, set(original.eos_ids))
        assert found.adds_bos == original.adds_bos
        assert found.special_ids >= original.special_ids
    assert load(back).generation_config["eos_token_id"] == load(tiny_model_dir).generation_config["eos_token_id"]
    bare = convert(there, tmp_path / "bare", tokenizer="none")
    assert not (bare / "tokenizer.json").exists()


def test_a_model_without_a_place_in_gguf_is_refused(tmp_path):
    # llama.cpp's Llama has no such thing; its file would be another model.
    odd = changed(tmp_path / "odd", "llama_gqa_tied", hidden_act="gelu")
    with pytest.raises(UnsupportedModelError, match="architecture llama would have another hidden_act"):
        convert(odd, tmp_path / "m.gguf")
    assert sorted(os.listdir(tmp_path)) == ["odd"]


def test_layers_that_nothing_reads_are_left_out(tmp_path):
    extra = "model.layers.4.eh_proj.weight"
    count = json.loads((FOLDER / "deepseek_v3_mla" / "config.json").read_text())["num_hidden_layers"]
    extra = extra.replace("4", str(count))
    source = changed(
        tmp_path / "source",
        "deepseek_v3_mla",
        tensors=lambda tensors: {**tensors, extra: np.ones((2, 2), np.float32)},
        num_nextn_predict_layers=1,
    )
    back = convert(source, tmp_path / "back")
    assert_same(tensors_of(FOLDER / "deepseek_v3_mla"), tensors_of(back))
    assert json.loads((back / "config.json").read_text())["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "npz"}, "format is 'npz'; supported are safetensors, orbax, gguf"),
        ({"dtype": "q8_0"}, "dtype is q8_0 and format safetensors; it has auto, float32, bfloat16, float16"),
        ({"dtype": "int8"}, "dtype is int8"),
        ({"format": "gguf"}, "only gguf has names that end in .gguf"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        convert(FOLDER / "llama_gqa_tied", tmp_path / "out", **settings)


def test_what_is_there_is_replaced_only_when_asked(tmp_path):
    source, output = FOLDER / "llama_gqa_tied", tmp_path / "out"
    convert(FOLDER / "qwen2_bias", output)
    with pytest.raises(ValueError, match="exists already; give another place, or set --overwrite"):
        convert(source, output)
    convert(source, output, overwrite=True)
    assert_same(tensors_of(output), tensors_of(source))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="is a directory that holds no model"):
        convert(source, tmp_path / "other", overwrite=True)
    with pytest.raises(ValueError, match="is the model itself"):
        convert(output, output, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]


def run(*arguments, limit=None):
    """The command, with files of at most `limit` bytes: what a full disk is to it."""
    code = "import resource, sys\n"
    if limit is not None:
        code += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
    code += "from jaxserve.convert import main\nmain(['convert', *sys.argv[1:]])"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.parametrize("output", ["safetensors", "orbax", "m.gguf"])
def test_a_disk_that_is_full_leaves_nothing_and_the_old_one_whole(tmp_path, output):
    model = write_tiny_model(tmp_path / "model", hidden_size=256, intermediate_size=512)
    kind = [] if "." in output else [f"--format={output}"]
    arguments = [f"--model={model}", f"--output={tmp_path / output}", *kind]
    done = run(*arguments, limit=200_000)
    assert done.returncode == 1, done.stderr
    assert f"error: {tmp_path / output} could not be written: " in done.stderr and "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["model"]
    assert run(*arguments).returncode == 0
    before = load(tmp_path / output)
    assert run(*arguments, "--overwrite", limit=200_000).returncode == 1
    after = load(tmp_path / output)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before.params, after.params))
    assert sorted(os.listdir(tmp_path)) == sorted(["model", output])


def test_mistakes_at_the_command_line_are_told_without_a_traceback(tmp_path):
    for arguments, status, message in (
        ([], 2, "--model is missing"),
        ([f"--model={tmp_path / 'no'}", f"--output={tmp_path / 'o'}"], 1, "was not found"),
        ([f"--model={FOLDER / 'qwen2_bias'}", f"--output={tmp_path}"], 2, "exists already"),
        ([f"--model={FOLDER / 'qwen2_bias'}", f"--output={tmp_path / 'o'}", "--dtype=int3"], 2, "--dtype"),
    ):
        done = run(*arguments)
        assert done.returncode == status, done.stderr
        assert message in done.stderr and "Traceback" not in done.stderr


def test_a_conversion_that_is_killed_leaves_nothing_that_loads(tmp_path, monkeypatch):
    from jaxserve import convert as module

    def killed(place):
        found = [*tmp_path.glob(".*")]
        assert (len(found) == 1 and not (found[0] / "config.json").exists()) or place == found[0]
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_write_beside", lambda place, *_: killed(place))
    with pytest.raises(KeyboardInterrupt):
        convert(FOLDER / "qwen2_bias", tmp_path / "out")
    assert not os.listdir(tmp_path)


def test_a_tensor_of_another_dtype_among_others_stays_so(tmp_path):
    source = changed(tmp_path / "source", "llama_gqa_tied")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float16)
    save_file(tensors, source / "model.safetensors")
    back = convert(convert(source, tmp_path / "there", format="orbax"), tmp_path / "back")
    assert_same(tensors_of(source), tensors_of(back))

"""The command line: its JSON contract, its console, what it refuses."""

import json

import pytest

from jaxserve.plan.__main__ import main
from pallas_kernels.common import deviceless
from tests.plan.models import write_config

CONTRACT = {"fits", "weights_bytes_per_device", "kv_bytes_per_token", "kv_pages", "max_concurrent_tokens"}


def test_json_has_the_keys_that_others_rely_on(capsys, tmp_path):
    output = tmp_path / "plan.json"
    words = [f"--model_config={tmp_path}", "--target=v5e-4", "--compile=false", "--json", f"--output={output}"]
    write_config(tmp_path)
    assert main(["plan", *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(output.read_text())
    assert printed.keys() >= CONTRACT
    assert printed["model"] == tmp_path.name and printed["fits"] is True
    assert printed["compiled"] is False and printed["activations_are"] == "estimated" and printed["programs"] == []
    assert printed["settings"]["tensor_parallel_size"] == 4


def test_the_console_says_what_does_not_fit_what_would_and_that_nothing_was_compiled(capsys):
    words = ["--model_config=llama-3.1-70b", "--target=v5e-8", "--nocompile", "--max_model_len=2048"]
    assert main(["plan", *words]) == 0
    text = capsys.readouterr().out
    assert "llama-3.1-70b on v5e-8 (8 x v5e, 1 host)" in text
    assert "does not fit: " in text and "per device are missing" in text
    assert "fits with --target=" in text
    assert "not compiled (--nocompile): activations are estimated, collectives assumed" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give model_config"),
        (["--model_config=llama-3.1-8b"], "give target"),
        (["--model_config=llama-3.1-8b", "--target=v5e-5"], "'v5e-5', which is no slice"),
        (["--model_config=llama-9", "--target=v5e-4"], "one of deepseek-v3, gemma-3-27b"),
        (["--model_config=../models/llama-3.1-8b", "--target=v5e-4"], "it must be a config.json"),
        (["--model_config=llama-3.1-8b", "--target=v5e-4", "--max_model_len=200000"], "the model's limit is 131072"),
        (["--model_config=llama-3.1-8b", "--target=v5e-4", "--tensor_parallel_size=8"], "v5e-4 has 4 devices"),
        (["--model_config=llama-3.1-8b", "--target=v5e-4", "--quantization=gguf"], "this model is none"),
        (["--model_config=llama-3.1-8b", "--target=h200x1", "--quantization=int4"], "keeps numbers of 4 bits"),
        (["--model_config=llama-3.1-8b", "--target=v5e-4", "--page_size=12"], "page_size is 12"),
    ],
)
def test_mistakes_are_named(capsys, words, says):
    with pytest.raises(SystemExit) as raised:
        main(["plan", *words, "--nocompile"])
    assert raised.value.code not in (0, None)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("target", "package"), [("v5e-32", "libtpu"), ("h200x4", "jax_cuda13_plugin")])
def test_a_compiler_that_is_missing_is_said_and_nothing_is_planned_instead(capsys, monkeypatch, target, package):
    monkeypatch.setattr(deviceless.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as raised:
        main(["plan", "--model_config=llama-3.1-8b", f"--target={target}"])
    assert raised.value.code not in (0, None)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{package} is not installed" in captured.err and "--nocompile plans without a compiler" in captured.err


def test_a_model_whose_numbers_loading_widens_is_planned_for(tmp_path):
    write_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert main(["plan", f"--model_config={tmp_path}", "--target=v5e-1", "--nocompile", "--json"]) == 0

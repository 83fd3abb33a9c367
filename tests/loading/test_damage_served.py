"""What a user sees of damaged checkpoints and adapters: one line and a status, or the others served."""

import os
import subprocess
import sys

import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.convert import Conversion, convert_checkpoint
from jaxserve.core import CheckpointError
from jaxserve.testing.tiny import write_tiny_model
from jaxserve.testing.tiny_lora import write_tiny_lora
from tests.loading.gguf_families import write_family
from tests.models.tiny_models import FOLDER


def serve(*flags):
    """Runs the server until it ends by itself: its status and what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve.server", "--http_port=0", "--grpc_port=0", *flags],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    return done.returncode, done.stdout, done.stderr


def cut(file):
    file.write_bytes(file.read_bytes()[:-50_000])
    return file


def damaged_hf(tmp_path):
    path = write_tiny_model(tmp_path / "model")
    return [f"--model={path}"], cut(path / "model.safetensors")


def damaged_gguf(tmp_path):
    path = write_family(tmp_path / "model.gguf", FOLDER / "mixtral_moe")
    return ["--skip_tokenizer_init", f"--model={path}"], cut(path)


def damaged_orbax(tmp_path):
    path = convert_checkpoint(Conversion(str(write_tiny_model(tmp_path / "hf")), tmp_path / "model", "orbax"))
    for file in (path / "params" / "ocdbt.process_0" / "d").iterdir():
        cut(file)
    return [f"--model={path}"], path / "params"


def damaged_config(tmp_path):
    path = write_tiny_model(tmp_path / "model", rms_norm_eps=[1])
    return [f"--model={path}"], path


def damaged_adapter(tmp_path):
    path = write_tiny_model(tmp_path / "model")
    lora = write_tiny_lora(tmp_path / "adapter", path)
    file = lora / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    return [f"--model={path}", "--enable_lora", f"--lora_modules=a={lora}"], file


@pytest.mark.parametrize("damage", [damaged_hf, damaged_gguf, damaged_orbax, damaged_config, damaged_adapter])
def test_the_server_ends_with_one_clear_line(tmp_path, damage):
    flags, named = damage(tmp_path)
    status, out, err = serve(*flags)
    assert status == 1
    assert "ready" not in out
    assert "Traceback" not in err
    joined = "".join(err.split())  # the console wraps lines
    assert "theenginedidnotstart" in joined and "".join(str(named).split()) in joined


def test_adapters_that_are_damaged_leave_the_others_served(tmp_path):
    """Loading one while the server runs fails alone."""
    from jaxserve import LLM, SamplingParams

    model = write_tiny_model(tmp_path / "model")
    good, bad = (write_tiny_lora(tmp_path / name, model, seed=seed) for seed, name in enumerate(("good", "bad")))
    tensors = load_file(bad / "adapter_model.safetensors")
    tensors.pop(next(iter(tensors)))
    save_file(tensors, bad / "adapter_model.safetensors")
    llm = LLM(
        str(model), dtype="float32", max_model_len=64, max_num_seqs=1, max_num_batched_tokens=16, page_size=16,
        num_pages=9, prefill_buckets=(16,), decode_buckets=(1,), table_width_buckets=(4,), enable_lora=True,
        max_loras=2,
    )  # fmt: skip
    llm.load_lora_adapter("good", str(good))
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors lacks lora_[AB] of model\.layers"):
        llm.load_lora_adapter("bad", str(bad))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    assert len(llm.generate([[1, 2, 3]], params, lora="good", use_tqdm=False)[0].outputs[0].token_ids) == 4

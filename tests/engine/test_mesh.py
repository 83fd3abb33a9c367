"""Meshes of several devices, in processes of their own: the device count is set at start.

The tiny model has two KV heads: two devices hold one each, of four two hold the same one.
"""

import json
import os
import subprocess
import sys

import pytest

from jaxserve.testing.tiny_lora import write_tiny_lora
from tests.models.tiny_models import FOLDER

SCRIPT = """
import json, sys
from jaxserve import LLM, SamplingParams
model, devices = sys.argv[1], int(sys.argv[2])
llm = LLM(model, dtype="float32", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16,
          page_size=4, num_pages=15,
          prefill_buckets=(16,), decode_buckets=(2,), table_width_buckets=(16,),
          compile_cache="",
          reservation="optimistic", preemption="swap", tensor_parallel_size=devices)
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
outputs = llm.generate([[1, 2, 3], list(range(40))], params, use_tqdm=False)
swapped = llm.engine.scheduler.counters.swapped_pages
loops = LLM(model, dtype="float32", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16,
            page_size=4, num_pages=33, prefill_buckets=(16,), decode_buckets=(2,), table_width_buckets=(16,),
            compile_cache="", tensor_parallel_size=devices, max_decode_steps=5, max_arrival_delay_s=1e6)
params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
drawn = [[o.outputs[0].token_ids for o in e.generate([[1, 2, 3], [9] * 7], params, use_tqdm=False)]
         for e in (llm, loops)]
assert loops.engine.stats.steps > 1.5 * loops.engine.stats.iterations and drawn[0] == drawn[1], drawn
print(json.dumps([[o.outputs[0].token_ids for o in outputs], swapped, drawn[1]]))
"""

FAMILIES = """
import json, sys
from pathlib import Path
from jaxserve import LLM, SamplingParams
for name in sys.argv[3:]:
    folder = Path(sys.argv[1]) / name
    golden = json.loads((folder / "golden.json").read_text())
    llm = LLM(str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=128, max_num_seqs=1,
              max_num_batched_tokens=16, page_size=16, num_pages=17, prefill_buckets=(16,), decode_buckets=(1,),
              table_width_buckets=(8,), compile_cache="", tensor_parallel_size=int(sys.argv[2]))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, prompt_logprobs=0)
    output = llm.generate([golden["prompt_ids"]], params, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == golden["greedy_ids"], name
    wanted = zip(golden["prompt_ids"][1:], golden["logprobs_of_prompt"][1:], strict=True)
    for entry, (token, want) in zip(output.prompt_logprobs[1:], wanted, strict=True):
        assert abs(entry[token].logprob - want) < 2e-3, name
print(json.dumps(len(sys.argv[3:])))
"""

LORA = """
import json, sys
from jaxserve import LLM, SamplingParams
model, devices, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
llm = LLM(model, dtype="float32", max_model_len=64, max_num_seqs=3, max_num_batched_tokens=32, page_size=4,
          num_pages=49, prefill_buckets=(32,), decode_buckets=(3,), table_width_buckets=(16,), compile_cache="",
          tensor_parallel_size=devices, enable_lora=True, max_loras=2, lora_modules=(f"a={folder}/a",))
llm.load_lora_adapter("b", folder + "/b")
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
outputs = llm.generate([[1, 2, 3], list(range(40)), [9] * 7], params, lora=["a", "b", ""], use_tqdm=False)
sharded = [str(pair.sharding.spec) for pair in llm.engine.runner.params["adapters"]["layers"][1]["mlp"]["up_proj"]]
print(json.dumps([[o.outputs[0].token_ids for o in outputs], sharded]))
"""

COPIES = """
import json, sys
import jax
from jaxserve.core import JaxserveError
from jaxserve.loading import load_model, resolve_model
from jaxserve.runtime import make_mesh
from jaxserve.runtime.kv_pool import PoolLayout
from jaxserve.runtime.programs import ProgramTable, _check_in_place
from jaxserve.tables import Bucket
mesh = make_mesh(int(sys.argv[2]))
loaded = load_model(resolve_model(sys.argv[1]), "float32", mesh=mesh)
kv = PoolLayout(loaded.config, mesh, 16, "float32", "cpu")
programs = ProgramTable(kv, loaded.params, max_num_seqs=4, dtype="float32")
if sys.argv[3:] == ["unpartitioned"]:
    jax.shard_map = lambda function, **_: function
found = []
for bucket in (Bucket(4, 0, 0, 4), Bucket(4, 16, 4, 4)):
    program = programs.compile(bucket, 2000)
    try:
        _check_in_place(bucket.name, program, kv.abstract(2000))
        found.append(program.memory_analysis().temp_size_in_bytes)
    except JaxserveError as e:
        found.append(str(e))
print(json.dumps(found))
"""


def run(script, *args):
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, args)], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_more_devices_give_the_ids_of_one(tiny_model_dir):
    one = run(SCRIPT, tiny_model_dir, 1)
    assert one[1], "nothing was swapped: the mesh shows less than it could"
    assert run(SCRIPT, tiny_model_dir, 2) == one
    assert run(SCRIPT, tiny_model_dir, 4) == one


@pytest.mark.parametrize(
    "names",
    [
        ("mistral_sliding", "qwen2_bias", "qwen3_qknorm"),
        ("gemma2_softcap", "gemma3_dual_rope"),
        ("phi3_fused", "olmo2_postnorm", "granite_multipliers"),
        ("starcoder2_layernorm", "glm4_interleaved", "smollm3_nope"),
    ],
    ids=lambda names: names[0],
)
def test_every_family_answers_alike_on_two_devices(names):
    assert run(FAMILIES, FOLDER, 2, *names) == len(names)


def test_norms_over_all_heads_and_shared_tensors_are_right_where_kv_heads_are_replicated():
    assert run(FAMILIES, FOLDER, 4, "olmo2_postnorm", "phi3_fused") == 2


def test_experts_answer_alike_one_for_each_device_and_where_they_do_not_divide():
    assert run(FAMILIES, FOLDER, 4, "mixtral_moe", "gpt_oss_sinks") == 2
    # 4 experts by their width of 96; 8 experts of width 32 on every device.
    assert run(FAMILIES, FOLDER, 3, "mixtral_moe", "gpt_oss_sinks", "qwen3_moe") == 3


@pytest.mark.parametrize("devices", [2, 4])
def test_no_device_copies_or_gathers_the_pool(tiny_model_dir, devices):
    pool_bytes = 2 * 2000 * 2 * (2 if devices == 4 else 1) * 16 * 16 * 4
    assert all(temp < pool_bytes / 8 for temp in run(COPIES, tiny_model_dir, devices))


def test_a_step_that_gathers_the_pool_is_refused_at_warm_up(tiny_model_dir):
    for message in run(COPIES, tiny_model_dir, 2, "unpartitioned"):
        assert "copies the KV pool of 8192000 bytes every time" in message and "all-gather f32[" in message


def test_adapters_on_more_devices_give_the_ids_of_one(tiny_model_dir, tmp_path):
    for seed, name in enumerate("ab"):
        write_tiny_lora(tmp_path / name, tiny_model_dir, seed=seed)
    ids, _ = run(LORA, tiny_model_dir, 1, tmp_path)
    for devices in (2, 4):
        got, (a, b) = run(LORA, tiny_model_dir, devices, tmp_path)
        assert got == ids
        assert "model" not in a and "model" in b, "up_proj is split by its outputs"


def test_more_devices_than_there_are_is_refused(tiny_model_dir):
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny_model_dir), "4"], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0 and "tensor_parallel_size is 4; this machine has 1 cpu device" in done.stderr

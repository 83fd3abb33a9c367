"""Meshes of several devices, in processes of their own: the device count is set at start.

The tiny model has two KV heads: two devices hold one each, of four two hold the same one. A process goes through
several meshes, since most of a short one's time is its start.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from jaxserve.testing.tiny import write_tiny_model
from jaxserve.testing.tiny_lora import write_tiny_lora
from tests.models.tiny_models import FOLDER

SCRIPT = """
import json, sys
import numpy as np
from jaxserve import LLM, SamplingParams
model = sys.argv[1]
shapes = dict(dtype="float32", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16, page_size=4,
              prefill_buckets=(16,), decode_buckets=(2,), table_width_buckets=(16,), compile_cache="")
found = []
for devices in map(int, sys.argv[2:]):
    llm = LLM(model, num_pages=17, reservation="optimistic", preemption="swap", tensor_parallel_size=devices, **shapes)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[1, 2, 3], list(range(40))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    swapped = llm.engine.scheduler.counters.swapped_pages
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
    engines = [llm]
    if devices in (2, 4):
        engines.append(LLM(model, num_pages=33, tensor_parallel_size=devices, max_decode_steps=5,
                           max_arrival_delay_s=1e6, **shapes))
    drawn = [[o.outputs[0].token_ids for o in e.generate([[1, 2, 3], [9] * 7], params, use_tqdm=False)]
             for e in engines]
    if len(engines) > 1:
        stats = engines[1].engine.stats
        assert stats.steps > 1.5 * stats.iterations and drawn[0] == drawn[1], drawn
    logits = np.concatenate(list(llm.engine.runner.prompt_logits(prompts[1])))
    pages = llm.engine.runner._pool.pages
    shards = [pages.sharding.shard_shape(pages.shape)]
    if devices > 1:
        queries = llm.engine.runner.params["layers"][0]["attention"]["q_proj"]["kernel"]
        shards.append(queries.sharding.shard_shape(queries.shape))
    found.append([[[o.outputs[0].token_ids for o in outputs], swapped, drawn[0]], logits.tolist(), shards])
print(json.dumps(found))
"""

FAMILIES = """
import json, sys
from pathlib import Path
from jaxserve import LLM, SamplingParams
for job in sys.argv[2:]:
    name, devices = job.split("@")
    folder = Path(sys.argv[1]) / name
    golden = json.loads((folder / "golden.json").read_text())
    llm = LLM(str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=128, max_num_seqs=1,
              max_num_batched_tokens=16, page_size=16, num_pages=17, prefill_buckets=(16,), decode_buckets=(1,),
              table_width_buckets=(8,), compile_cache="", tensor_parallel_size=int(devices))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, prompt_logprobs=0)
    output = llm.generate([golden["prompt_ids"]], params, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == golden["greedy_ids"], job
    wanted = zip(golden["prompt_ids"][1:], golden["logprobs_of_prompt"][1:], strict=True)
    for entry, (token, want) in zip(output.prompt_logprobs[1:], wanted, strict=True):
        assert abs(entry[token].logprob - want) < 2e-3, job
print(json.dumps(len(sys.argv[2:])))
"""

LORA = """
import json, sys
from jaxserve import LLM, SamplingParams
model, folder = sys.argv[1:3]
found = []
for devices in map(int, sys.argv[3:]):
    llm = LLM(model, dtype="float32", max_model_len=64, max_num_seqs=3, max_num_batched_tokens=32, page_size=4,
              num_pages=49, prefill_buckets=(32,), decode_buckets=(3,), table_width_buckets=(16,), compile_cache="",
              tensor_parallel_size=devices, enable_lora=True, max_loras=2, lora_modules=(f"a={folder}/a",))
    llm.load_lora_adapter("b", folder + "/b")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([[1, 2, 3], list(range(40)), [9] * 7], params, lora=["a", "b", ""], use_tqdm=False)
    layers = llm.engine.runner.params["adapters"]["layers"]
    sharded = [str(pair.sharding.spec) for pair in layers[1]["mlp"]["up_proj"]]
    found.append([[o.outputs[0].token_ids for o in outputs], sharded])
print(json.dumps(found))
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
def look(devices):
    mesh = make_mesh(devices)
    loaded = load_model(resolve_model(sys.argv[1]), "float32", mesh=mesh)
    kv = PoolLayout(loaded.config, mesh, 16, "float32", "cpu")
    programs = ProgramTable(kv, loaded.params, max_num_seqs=4, dtype="float32")
    found = []
    for bucket in (Bucket(4, 0, 0, 4), Bucket(4, 16, 4, 4)):
        program = programs.compile(bucket, 2000)
        try:
            _check_in_place(bucket.name, program, kv.abstract(2000))
            found.append(program.memory_analysis().temp_size_in_bytes)
        except JaxserveError as e:
            found.append(str(e))
    return found
found = [look(2), look(4)]
jax.shard_map = lambda function, **_: function
found.append(look(2))
print(json.dumps(found))
"""


def run(script, *args):
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, args)], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_more_devices_give_the_ids_and_logits_of_one(tmp_path):
    model = write_tiny_model(tmp_path, num_attention_heads=8)
    (one, logits, _), *others = run(SCRIPT, model, 1, 2, 4, 8)
    assert one[1], "nothing was swapped: the mesh shows less than it could"
    for devices, (found, other_logits, (pool, queries)) in zip((2, 4, 8), others, strict=True):
        assert found == one, devices
        np.testing.assert_allclose(other_logits, logits, atol=2e-4, err_msg=str(devices))
        # Two KV heads: one on each device, of four and eight the same one on several. Eight query heads always divide.
        assert (pool[3], queries[1]) == (1, 8 * 16 // devices)


@pytest.mark.parametrize(
    "names",
    [
        ("mistral_sliding", "qwen2_bias", "qwen3_qknorm", "gemma2_softcap", "gemma3_dual_rope", "phi3_fused"),
        ("olmo2_postnorm", "granite_multipliers", "starcoder2_layernorm", "glm4_interleaved", "smollm3_nope"),
    ],
    ids=lambda names: names[0],
)
def test_every_family_answers_alike_on_two_devices(names):
    assert run(FAMILIES, FOLDER, *(f"{name}@2" for name in names)) == len(names)


def test_what_does_not_divide_by_the_devices_answers_alike():
    """Norms over all heads and shared tensors where KV heads are replicated; experts, one for each device and not.

    On three devices 4 experts are split by their width of 96, 8 experts of width 32 are on every one.
    """
    jobs = ("olmo2_postnorm@4", "phi3_fused@4", "mixtral_moe@4", "gpt_oss_sinks@4", "mixtral_moe@3", "gpt_oss_sinks@3",
            "qwen3_moe@3")  # fmt: skip
    assert run(FAMILIES, FOLDER, *jobs) == len(jobs)


def test_no_device_copies_or_gathers_the_pool_and_a_step_that_did_is_refused_at_warm_up(tiny_model_dir):
    on_two, on_four, unpartitioned = run(COPIES, tiny_model_dir)
    pool_bytes = 2 * 2000 * 2 * 16 * 16 * 4  # with one KV head; on four devices each has both
    assert all(temp < pool_bytes / 8 for temp in on_two) and all(temp < 2 * pool_bytes / 8 for temp in on_four)
    for message in unpartitioned:
        assert "copies the KV pool of 8192000 bytes every time" in message and "all-gather f32[" in message


def test_adapters_on_more_devices_give_the_ids_of_one(tiny_model_dir, tmp_path):
    for seed, name in enumerate("ab"):
        write_tiny_lora(tmp_path / name, tiny_model_dir, seed=seed)
    (ids, _), *others = run(LORA, tiny_model_dir, tmp_path, 1, 2, 4)
    for got, (a, b) in others:
        assert got == ids
        assert "model" not in a and "model" in b, "up_proj is split by its outputs"


def test_more_devices_than_there_are_is_refused_by_the_flags_name(tiny_model_dir):
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    flags = (f"--model={tiny_model_dir}", "--tensor_parallel_size=4", "--http_port=0", "--grpc_port=0")
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve.server", *flags], env=env, capture_output=True, text=True, timeout=300
    )
    message = " ".join(done.stderr.split())
    assert done.returncode == 1 and "tensor_parallel_size is 4; this machine has 1 cpu device" in message

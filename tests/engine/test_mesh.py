"""The same ids on a mesh of two devices, in a process of its own: the device count is set at start."""

import json
import os
import subprocess
import sys

SCRIPT = """
import json, sys
from jaxserve import LLM, SamplingParams
model, devices = sys.argv[1], int(sys.argv[2])
llm = LLM(model, dtype="float32", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16, num_pages=10,
          prefill_buckets=(16,), decode_buckets=(2,), table_width_buckets=(4,), compile_cache="",
          tensor_parallel_size=devices)
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
outputs = llm.generate([[1, 2, 3], list(range(40))], params, use_tqdm=False)
print(json.dumps([o.outputs[0].token_ids for o in outputs]))
"""


def run(model, devices):
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), str(devices)], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_two_devices_give_the_ids_of_one(tiny_model_dir):
    assert run(tiny_model_dir, 2) == run(tiny_model_dir, 1)


def test_more_devices_than_there_are_is_refused(tiny_model_dir):
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny_model_dir), "4"], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0 and "tensor_parallel_size is 4; this machine has 1 cpu device" in done.stderr

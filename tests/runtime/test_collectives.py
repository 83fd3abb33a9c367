"""What devices send each other in a step, counted in compiled programs; and which KV head a query head reads.

In processes of their own, with eight virtual devices.
"""

import json

import pytest

from jaxserve.testing.tiny import write_tiny_model
from tests.engine.test_mesh import run
from tests.models.tiny_models import FOLDER

COUNTS = r"""
import collections, json, math, re, sys
from jaxserve.loading import load_model, model_config_of, resolve_model
from jaxserve.runtime import make_mesh
from jaxserve.runtime.kv_pool import PoolLayout
from jaxserve.runtime.programs import ProgramTable
from jaxserve.tables import Bucket

COLLECTIVE = re.compile(
    r"= \(?\w+\[([\d,]*)\][^=]*? "
    r"(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast)(?:-start)?\("
)

def counted(program):
    '''Of each kind of collective the sizes of what it gives, in numbers.'''
    found = collections.defaultdict(list)
    for dims, kind in COLLECTIVE.findall(program.as_text()):
        found[kind].append(math.prod(int(size) for size in dims.split(",") if size))
    return found

found = {}
for devices in map(int, sys.argv[2:]):
    resolved = resolve_model(sys.argv[1])
    mesh = make_mesh(devices, model_config_of(resolved))
    loaded = load_model(resolved, "float32", mesh=mesh)
    kv = PoolLayout(loaded.config, mesh, 16, "float32", "cpu")
    programs = ProgramTable(kv, loaded.params, max_num_seqs=4, dtype="float32")
    steps = [counted(programs.compile(bucket, 64)) for bucket in (Bucket(4, 0, 0, 4), Bucket(4, 16, 4, 4))]
    found[devices] = [*steps, counted(programs.compile_sampler(4))]
print(json.dumps(found))
"""

HEADS = """
import itertools, json, sys
import jax, jax.numpy as jnp, numpy as np
from jaxserve.models import AttentionOptions, model_config_from_hf
from jaxserve.runtime import make_mesh
from jaxserve.runtime.kv_pool import PoolLayout
from jaxserve.runtime.steps import _make_attend
from jaxserve.tables import Bucket
from jaxserve.testing.tiny import tiny_config

rows, kv_heads, width = 3, 2, 4
fields = {
    "decode_pages": jnp.arange(1, 1 + rows * width).reshape(1, rows, width),
    "decode_position": jnp.asarray([0, 17, 40]),
    "prefill_pages": jnp.zeros((1, 0, width), jnp.int32),
}
def attended(ratio, devices, copies):
    hf = tiny_config(num_attention_heads=ratio * kv_heads, num_key_value_heads=kv_heads)
    config = model_config_from_hf(hf)
    kv = PoolLayout(config, make_mesh(devices, config if copies else None), 16, "float32", "cpu")
    place = fields["decode_position"]
    page_ids = jnp.take_along_axis(fields["decode_pages"], (place // 16)[None, :, None], axis=2)[..., 0]
    attend = _make_attend(kv, Bucket(rows, 0, 0, width), fields, page_ids, place % 16)
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(rows, heads, 16)), jnp.float32) for heads in (ratio * kv_heads, kv_heads))
    v = jnp.broadcast_to(jnp.arange(kv_heads, dtype=jnp.float32)[None, :, None], k.shape)
    pages = kv.make(1 + rows * width)
    # What earlier tokens left: every V is its head's number too.
    heads = jnp.arange(kv_heads, dtype=jnp.float32)[None, None, :, None, None]
    pages = jax.jit(lambda p: p._replace(pages=p.pages.at[:, :, 1].set(heads)), out_shardings=kv.sharding)(pages)
    out, _ = jax.jit(lambda *args: attend(0, *args, AttentionOptions(None, 0.25)))(q, k, v, pages)
    return np.asarray(out)

for ratio in (1, 2, 4, 8):
    heads = ratio * kv_heads
    wanted = np.broadcast_to((np.arange(heads) * kv_heads // heads)[None, :, None], (rows, heads, 16))
    for devices, copies in itertools.product((1, 2, 4, 8), (False, True)):
        found = attended(ratio, devices, copies)
        np.testing.assert_allclose(found, wanted, atol=1e-6, err_msg=f"{ratio} {devices} {copies}")
print(json.dumps("all"))
"""

LAYERS, VOCAB, ROWS, CHUNK = 3, 320, 4, 16
PROMPT_SCORES = {"all-reduce": 4, "all-gather": 1}
"""Of log-probabilities of a prompt, in a branch that runs only where a request asks for them."""


def assert_collectives(model, heads, kv_heads, experts):
    """Exactly: one sum for the embedding, one per layer and part of it that is split, and queries where every device
    has all KV heads; nothing of the pool, and no logits in a step but those of prompts."""
    for devices, (decode, mixed, sampler) in run(COUNTS, model, 2, 4, 8).items():
        count = int(devices)
        split, kv_split = heads % count == 0, kv_heads % count == 0 or count % kv_heads == 0
        sums = 1 + LAYERS * (split + (experts is None or experts % count == 0))
        queries = LAYERS * (split and not kv_split)
        assert {kind: len(sizes) for kind, sizes in decode.items()} == (
            {"all-reduce": sums} | ({"all-gather": queries} if queries else {})
        ), devices
        assert {kind: len(sizes) for kind, sizes in mixed.items()} == {
            "all-reduce": sums + PROMPT_SCORES["all-reduce"],
            "all-gather": queries + PROMPT_SCORES["all-gather"],
        }, devices
        # Hidden states and queries of the rows; the logits of a block of prompt positions.
        assert max(decode["all-reduce"]) <= ROWS * 64 and max(decode.get("all-gather", [0])) <= ROWS * heads * 16
        assert max(mixed["all-gather"]) <= max(CHUNK * VOCAB, (ROWS + CHUNK) * heads * 16)
        # Of the sampler's branches each gathers the logits at most once: the first largest by blocks, on CPU only, in
        # two places; drawing; log-probabilities.
        assert len([size for size in sampler["all-gather"] if size >= ROWS * VOCAB]) == 4, devices


@pytest.mark.parametrize("heads, kv_heads", [(8, 2), (24, 3)])
def test_collectives_of_a_dense_models_steps(tmp_path, heads, kv_heads):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": LAYERS}
    assert_collectives(write_tiny_model(tmp_path, vocab=VOCAB, **sizes), heads, kv_heads, experts=None)


def test_collectives_of_a_mixture_of_experts_steps():
    config = json.loads((FOLDER / "mixtral_moe" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"], config["hidden_size"]) == (LAYERS, VOCAB, 64)
    assert_collectives(FOLDER / "mixtral_moe", config["num_attention_heads"], config["num_key_value_heads"], 8)


def test_krn_4_a_query_head_reads_its_own_kv_head_on_every_mesh():
    assert run(HEADS) == "all"

"""LoRA adapters in the engine: what they compute, in any company, and that they come and go."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM, SamplingParams
from jaxserve.core import AdapterNotFoundError, RejectedError, Submission, Terms
from jaxserve.engine.dry_run import start_plan
from jaxserve.runtime import COMPILES
from jaxserve.testing.tiny_lora import write_tiny_lora
from tests.engine.conftest import assert_idle_clean, greedy, ids, random_prompts
from tests.engine.test_trace_replay import replayed
from tests.models.tiny_models import FOLDER

LENGTHS = (5, 90, 17, 3, 64, 33, 1, 40)
NAMES = ("", "plain", "", "partly", "ranks", "plain", "ranks", "partly")
ALL = ("plain", "partly", "ranks")
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 12}
ONE_BY_ONE = {"decoder_implementation": "xla"}
RANKS = {"rank_pattern": {"layers.1.mlp.down_proj": 3}, "alpha_pattern": {"q_proj": 5}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_model_dir):
    """A folder per adapter."""
    at = tmp_path_factory.mktemp("lora")
    write_tiny_lora(at / "plain", tiny_model_dir, seed=1)
    write_tiny_lora(
        at / "partly", tiny_model_dir, seed=2, rank=7, alpha=16, targets=("q_proj", "down_proj"), layers=[1]
    )
    write_tiny_lora(at / "ranks", tiny_model_dir, seed=3, rank=12, alpha=9, use_rslora=True, **RANKS)
    return at


@pytest.fixture(scope="module")
def make(make_llm, folders):
    """`make(**settings)`: an LLM that has the adapters."""

    def make(**settings):
        llm = make_llm(**LORA, **settings)
        for name in ALL:
            if name not in {adapter.name for adapter in llm.lora_adapters}:
                llm.load_lora_adapter(name, str(folders / name))
        return llm

    return make


def settings_of(kind):
    if kind == "greedy":
        return [greedy(20) for _ in LENGTHS]
    return [SamplingParams(temperature=0.9, seed=i, max_tokens=20, ignore_eos=True) for i in range(len(LENGTHS))]


@pytest.fixture(scope="module", params=["greedy", "seeded"])
def case(request, make):
    """(prompts, settings, ids of each prompt when it runs alone with its adapter)."""
    llm = make(overlap=False, enable_prefix_caching=False)
    prompts, settings = random_prompts(LENGTHS, seed=4), settings_of(request.param)
    return prompts, settings, [alone(llm, *each) for each in zip(prompts, settings, NAMES, strict=True)]


def alone(llm, prompt, params, name):
    return ids(llm.generate([prompt], params, lora=name, use_tqdm=False))[0]


def scores(llm, prompts, **settings):
    """Log-probabilities of prompts and outputs, position by position."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=20, prompt_logprobs=20)
    outputs = llm.generate(prompts, params, use_tqdm=False, **settings)
    return [
        {token: entry.logprob for token, entry in position.items()}
        for output in outputs
        for position in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs)
    ]


def test_adapters_change_what_is_said(case):
    each = case[2]
    assert len({tuple(tokens) for tokens in each}) == len(each)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_without_an_adapter_scores_have_the_bits_of_an_engine_without_lora(make_llm, make, dtype):
    """Layers one by one in both, adapters of others in the batch or not."""
    prompts = random_prompts((5, 33, 70, 6, 34, 71), seed=5)
    without = scores(make_llm(dtype=dtype, **ONE_BY_ONE), prompts)
    llm = make(dtype=dtype)
    assert scores(llm, prompts) == without
    # The same prompts, so that their chunks are the same: the order of additions follows them.
    mixed = scores(llm, prompts, lora=["", "", "", "plain", "ranks", "partly"])
    count = sum(len(prompt) - 1 + 6 for prompt in prompts[:3])
    assert mixed[:count] == without[:count]
    assert not any(one == other for one, other in zip(mixed[count:], without[count:], strict=True))


def test_the_default_form_says_the_same(make_llm, make):
    prompts = random_prompts(LENGTHS, seed=6)
    want = ids(make_llm().generate(prompts, greedy(16), use_tqdm=False))
    assert ids(make().generate(prompts, greedy(16), use_tqdm=False)) == want


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap": False},
        {"prefill_chunk": 12, "max_num_seqs": 3},
        {"matmul_implementation": "xla"},
        {"scan_layers": True},
        {"page_size": 4, "num_pages": 62, "reservation": "optimistic", "preemption": "recompute"},
        {"page_size": 4, "num_pages": 62, "reservation": "optimistic", "preemption": "swap"},
        {"max_decode_steps": 5, "max_arrival_delay_s": 1e6},
    ],
    ids=["overlap", "in turns", "chunks", "xla", "stacked", "recompute", "swap", "several steps"],
)
def test_mixed_in_one_batch_each_gets_what_it_gets_alone(make, case, settings):
    prompts, params, want = case
    llm = make(**settings)
    engine = llm.engine
    preempted, iterations, steps = engine.scheduler.counters.preemptions, engine.stats.iterations, engine.stats.steps
    compiles = COMPILES.count
    assert ids(llm.generate(prompts, params, lora=NAMES, use_tqdm=False)) == want
    assert COMPILES.count == compiles
    if "preemption" in settings:
        assert engine.scheduler.counters.preemptions > preempted, "nothing was preempted: the test shows nothing"
    if "max_decode_steps" in settings:
        assert engine.stats.steps - steps > engine.stats.iterations - iterations, "there were single steps only"
    assert_idle_clean(llm)


def merged(model, adapter, to):
    """A copy of the model with an adapter added to its weights, by PEFT's rules."""
    config, tensors = json.loads((adapter / "adapter_config.json").read_text()), load_file(model / "model.safetensors")
    pairs = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in pairs if ".lora_A." in name]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        rank = next((r for key, r in config.get("rank_pattern", {}).items() if module.endswith(key)), config["r"])
        alpha = next(
            (a for key, a in config.get("alpha_pattern", {}).items() if module.endswith(key)), config["lora_alpha"]
        )
        scale = alpha / (np.sqrt(rank) if config.get("use_rslora") else rank)
        a, b = pairs[name].astype(np.float64), pairs[name.replace("lora_A", "lora_B")].astype(np.float64)
        tensors[f"{module}.weight"] = (tensors[f"{module}.weight"] + scale * (b @ a)).astype(np.float32)
    to.mkdir()
    for file in model.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    save_file(tensors, to / "model.safetensors")
    return to


@pytest.mark.parametrize("name", ALL)
def test_scores_are_those_of_weights_with_the_adapter_merged(make, make_llm, folders, tiny_model_dir, tmp_path, name):
    prompts = random_prompts((5, 40), seed=7)
    directory = merged(tiny_model_dir, folders / name, tmp_path / "merged")
    reference = LLM(
        str(directory), dtype="float32", max_model_len=128, max_num_batched_tokens=64, num_pages=66,
        decode_buckets=(8,), prefill_buckets=(64,), table_width_buckets=(8,), compile_cache="",
    )  # fmt: skip
    want, got = scores(reference, prompts), scores(make(), prompts, lora=name)
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        # Of the likeliest twenty the last may change places.
        both = one.keys() & other.keys()
        assert len(both) >= 19
        assert [one[token] for token in both] == pytest.approx([other[token] for token in both], abs=2e-4)


@pytest.mark.parametrize("family", ["starcoder2_layernorm", "glm4_interleaved"])
def test_adapters_name_modules_as_their_family_does(tmp_path, family):
    """Every matrix of the layers, with other names than Llama's and fused ones."""
    model, adapter, rng = FOLDER / family, tmp_path / "adapter", np.random.default_rng(0)
    pairs = {}
    for name, value in load_file(model / "model.safetensors").items():
        if value.ndim == 2 and ".layers." in name:
            out, rows = value.shape
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            pairs[f"{prefix}.lora_A.weight"] = rng.normal(0, rows**-0.5, (4, rows)).astype(np.float32)
            pairs[f"{prefix}.lora_B.weight"] = rng.normal(0, 0.5, (out, 4)).astype(np.float32)
    targets = sorted({name.split(".")[-3] for name in pairs})
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": targets, "bias": "none"}
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    save_file(pairs, adapter / "adapter_model.safetensors")
    settings = dict(
        dtype="float32", skip_tokenizer_init=True, max_model_len=64, max_num_batched_tokens=64, page_size=16,
        num_pages=17, decode_buckets=(8,), prefill_buckets=(64,), table_width_buckets=(4,), compile_cache="",
    )  # fmt: skip
    llm = LLM(str(model), **LORA, lora_modules=(f"a={adapter}",), **settings)
    reference = LLM(str(merged(model, adapter, tmp_path / "merged")), **settings)
    prompts = [list(range(3, 43))]
    without, got, want = scores(llm, prompts), scores(llm, prompts, lora="a"), scores(reference, prompts)
    assert got != without
    for one, other in zip(got, want, strict=True):
        both = one.keys() & other.keys()
        assert len(both) >= 19
        assert [one[token] for token in both] == pytest.approx([other[token] for token in both], abs=5e-4)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_have_adapters_too(make_llm, make, quantization):
    prompts = random_prompts((5, 33, 70), seed=8)
    llm = make(quantization=quantization)
    without = scores(make_llm(quantization=quantization, **ONE_BY_ONE), prompts)
    assert scores(llm, prompts) == without
    names = ("plain", "", "ranks")
    got = ids(llm.generate(prompts, greedy(12), lora=names, use_tqdm=False))
    assert got == [alone(llm, prompt, greedy(12), name) for prompt, name in zip(prompts, names, strict=True)]
    assert got[0] != alone(llm, prompts[0], greedy(12), "")


def test_a_name_that_is_loaded_again_is_another_adapter(make, folders):
    llm = make()
    prompt = random_prompts((48,), seed=9)[0]
    old, new = alone(llm, prompt, greedy(8), "plain"), alone(llm, prompt, greedy(8), "ranks")
    (before,) = [adapter for adapter in llm.lora_adapters if adapter.name == "plain"]
    compiles = COMPILES.count
    llm.unload_lora_adapter("plain")
    with pytest.raises(RejectedError, match="'plain' is not loaded"):
        llm.generate([prompt], greedy(8), lora="plain", use_tqdm=False)
    after = llm.load_lora_adapter("plain", str(folders / "ranks"))
    assert (after.name, after.place) == (before.name, before.place) and after.number != before.number
    (output,) = llm.generate([prompt], greedy(8), lora="plain", use_tqdm=False)
    assert output.num_cached_tokens == 0, "pages of the earlier loading were found"
    assert ids([output])[0] == new != old
    llm.unload_lora_adapter("plain")
    llm.load_lora_adapter("plain", str(folders / "plain"))
    assert alone(llm, prompt, greedy(8), "plain") == old
    assert COMPILES.count == compiles


def test_cached_pages_are_of_one_adapter(make):
    llm = make()
    llm.engine.reset_prefix_cache()
    prompt = random_prompts((48,), seed=10)[0]
    for name in ("", *ALL):
        for cached in (0, 32):
            (output,) = llm.generate([prompt], greedy(2), lora=name, use_tqdm=False)
            assert output.num_cached_tokens == cached
    for salt in ("1", "2", "3"):  # numbers of adapters
        (output,) = llm.generate([prompt], greedy(2), terms=Terms(cache_salt=salt), use_tqdm=False)
        assert output.num_cached_tokens == 0


def test_a_trace_with_adapters_replays(make, tmp_path):
    path = tmp_path / "trace.jsonl"
    llm = make(trace_file=str(path), max_num_seqs=4, num_pages=40)
    prompt = random_prompts((70,), seed=11)[0]
    outputs = llm.generate([prompt] * 12, greedy(6), lora=[*NAMES, *NAMES][:12], use_tqdm=False)
    llm.engine.close()
    cached = {output.num_cached_tokens for output in outputs}
    assert {0, 64} <= cached, "not all was shared or all was: the test shows nothing"
    replayed(path)


def test_a_place_is_free_when_the_last_request_of_its_adapter_has_ended(make, folders):
    llm = make()
    engine = llm.engine
    prompt = random_prompts((9,), seed=12)[0]
    want = alone(llm, prompt, greedy(30), "partly")
    with pytest.raises(ValueError, match=r"3 LoRA adapters are loaded, the limit \(max_loras\)"):
        llm.load_lora_adapter("fourth", str(folders / "plain"))
    got = []
    (request,) = engine.make_requests(submission(prompt, "partly"), 0.0)
    engine.add(request, 0, lambda delta: got.extend(delta.token_ids))
    for _ in range(4):
        engine.step()
    llm.unload_lora_adapter("partly")
    with pytest.raises(RejectedError, match="held by requests that still run"):
        llm.load_lora_adapter("fourth", str(folders / "plain"))
    with pytest.raises(RejectedError, match="is not loaded"):
        engine.make_requests(submission(prompt, "partly"), 0.0)
    while engine.has_work:
        engine.step()
    assert got == want
    llm.load_lora_adapter("fourth", str(folders / "plain"))
    assert alone(llm, prompt, greedy(8), "fourth") == alone(llm, prompt, greedy(8), "plain")
    llm.unload_lora_adapter("fourth")


def test_a_request_made_before_its_adapter_was_unloaded_is_refused(make, folders):
    """Another may have its place by the time it is queued."""
    llm = make()
    (request,) = llm.engine.make_requests(submission([1, 2, 3], "ranks"), 0.0)
    llm.unload_lora_adapter("ranks")
    llm.load_lora_adapter("ranks", str(folders / "plain"))
    with pytest.raises(RejectedError, match="the request's LoRA adapter was unloaded"):
        llm.engine.add(request, 0, lambda delta: None)
    llm.unload_lora_adapter("ranks")


def test_a_dry_run_counts_adapters(make, tiny_model_dir):
    config = dataclasses.replace(make().engine.config, model=str(tiny_model_dir))
    planned, without = (
        start_plan(dataclasses.replace(config, enable_lora=on)).memory.weights_bytes for on in (True, False)
    )
    assert planned == make().engine.runner.memory_plan.weights_bytes
    # 3 places of rank 12, kept as 16, filled up to 64 columns; 1,024 numbers of in and out in a layer.
    assert planned - without == 4 * (64 + 2 * 64 * 1024)


def submission(prompt, name):
    return Submission(prompt, greedy(30), "one", adapter=name)


def test_what_cannot_be_is_refused(make, llm, folders, tiny_model_dir):
    with pytest.raises(ValueError, match="start with enable_lora"):
        llm.load_lora_adapter("a", str(folders / "plain"))
    lora = make()
    with pytest.raises(ValueError, match="has already been loaded"):
        lora.load_lora_adapter("plain", str(folders / "plain"))
    with pytest.raises(ValueError, match="the model's own name"):
        lora.load_lora_adapter(lora.engine.model_name, str(folders / "plain"))
    lora.unload_lora_adapter("plain")
    with pytest.raises(AdapterNotFoundError, match="holds no LoRA adapter"):
        lora.load_lora_adapter("nowhere", str(folders / "nowhere"))
    with pytest.raises(AdapterNotFoundError, match="'nowhere' cannot be found"):
        lora.unload_lora_adapter("nowhere")
    with pytest.raises(ValueError, match="native_cpu: LoRA adapters"):
        LLM(str(tiny_model_dir), dtype="float32", enable_lora=True, decoder_implementation="native_cpu")

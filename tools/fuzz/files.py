"""Targets: model files and what else is read from disk."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxserve.batch.request_file import RequestFile
from jaxserve.batch.result_file import Done
from jaxserve.config.api_keys import read_api_keys
from jaxserve.config.service_class import read_service_classes
from jaxserve.core import CheckpointError, UnsupportedModelError
from jaxserve.faults.plan import ALLOW_VARIABLE, read_fault_plan
from jaxserve.loading.gguf_reader import GgufReader
from jaxserve.loading.json_file import read_json_object
from jaxserve.loading.safetensors_reader import SafetensorsReader
from jaxserve.models.registry import model_config_from_hf
from jaxserve.testing.tiny import tiny_config
from tools.fuzz.taker import Taker, damaged, document, json_text, text
from tools.fuzz.target import Target

_MOST_VALUES = 1 << 16
"""Tensors of more values are not read: the file's size bounds them, and they cost time only."""
CLASSES: list[Any] = [
    {"chat": {"max_slots": 4, "ttft_target_s": 0.5, "itl_target_s": 0.05}, "bulk": {"priority": 1, "deadline_s": 60}},
    {"a": {"max_queue_requests": 0, "max_queue_tokens": 100}},
]
PLANS: list[Any] = [
    [
        {"at": "runner.dispatch", "do": "raise", "iteration": 12},
        {"at": "runner.collect", "do": "hang", "skip": 40, "seconds": 5},
        {"at": "runner.dispatch", "do": "nan", "request_id": "bad-*", "times": None},
    ]
]
LINES: list[Any] = [
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "The sea", "max_tokens": 4}},
    {"custom_id": "b", "method": "POST", "url": "/v1/responses", "body": {"input": "hi", "stream": False}},
]


@functools.cache
def folder() -> Path:
    """Where files of this process are written; in memory where the system has such a place."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    made = tempfile.TemporaryDirectory(prefix="jaxserve_fuzz_", dir=base)
    _KEPT.append(made)
    return Path(made.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []
"""Folders that end with the process."""


def written(name: str, data: bytes) -> Path:
    """A file with this content, until the next one of that name."""
    path = folder() / name
    path.write_bytes(data)
    return path


@functools.cache
def _gguf_seeds() -> tuple[bytes, ...]:
    found = []
    for arch, kind in (("llama", gguf.GGMLQuantizationType.F32), ("qwen2", gguf.GGMLQuantizationType.Q8_0)):
        path = folder() / "seed.gguf"
        writer = gguf.GGUFWriter(path, arch)
        writer.add_context_length(64)
        writer.add_embedding_length(32)
        writer.add_block_count(1)
        writer.add_feed_forward_length(32)
        writer.add_head_count(2)
        writer.add_head_count_kv([1])
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(2.0)
        writer.add_eos_token_id(2)
        writer.add_token_list(["a", "b", "é"])
        writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
        for name, rows in (("token_embd", 3), ("blk.0.attn_q", 32), ("blk.0.attn_k", 16), ("output", 3)):
            value = np.linspace(-1, 1, rows * 32, dtype=np.float32).reshape(rows, 32)
            data = value if kind == gguf.GGMLQuantizationType.F32 else gguf.quantize(value, kind)
            writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
        writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found.append(path.read_bytes())
    return tuple(found)


def _gguf(data: bytes) -> None:
    taker = Taker(data)
    whole = taker.rest() if taker.below(4) == 0 else damaged(taker, taker.of(_gguf_seeds()))
    reader = GgufReader(written("model.gguf", whole))
    _read_all(reader)
    model_config_from_hf(reader.hf_config)


def _read_all(reader: Any) -> None:
    for name in reader.names():
        shape = reader.shape(name)
        reader.dtype(name)
        if np.prod(shape, dtype=float) <= _MOST_VALUES:
            # Of a config and tensors that do not fit each other: `load_model` compares shapes before it reads.
            assert reader.read(name).shape == shape


@functools.cache
def _configs() -> list[Any]:
    base = Path(__file__).parents[2] / "configs" / "models"
    return [tiny_config(), *(json.loads(path.read_text()) for path in sorted(base.glob("*.json")))]


def _model_config(data: bytes) -> None:
    model_config_from_hf(read_json_object(written("config.json", json_text(data, _configs()))))


_HEADER = {
    "__metadata__": {"format": "pt"},
    "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "U8", "shape": [], "data_offsets": [32, 33]},
}


def _safetensors(data: bytes) -> None:
    taker = Taker(data)
    match taker.below(4):
        case 0:
            whole = taker.rest()
        case 1 | 2:
            head = text(document(taker, [_HEADER]))
            whole = len(head).to_bytes(8, "little") + head + bytes(taker.of((33, 33, 33, 0, 32, 40)))
        case _:
            head = text(_HEADER)
            whole = damaged(taker, len(head).to_bytes(8, "little") + head + bytes(33))
    written("config.json", b"{}")
    written("model.safetensors", whole)
    reader = SafetensorsReader(folder())
    for name in reader.names():
        if np.prod(reader.shape(name), dtype=float) <= _MOST_VALUES:
            assert reader.read(name).shape == reader.shape(name)


def _service_classes(data: bytes) -> None:
    read_service_classes(written("classes.json", json_text(data, CLASSES)))


def _fault_plan(data: bytes) -> None:
    os.environ[ALLOW_VARIABLE] = "1"  # of a process that fuzzes
    plan = read_fault_plan(str(written("plan.json", json_text(data, PLANS))))
    for fault in plan.faults:
        assert 0 <= fault.seconds <= 86400 and fault.skip >= 0, f"a fault that cannot be carried out: {fault}"
        fault.fits(12, ("bad-1",))


def _api_keys(data: bytes) -> None:
    keys = read_api_keys(written("keys", data))
    assert all(each.key and each.key == each.key.strip() for each in keys)


def _batch_lines(data: bytes) -> None:
    taker = Taker(data)
    lines = [
        taker.some(taker.below(40)) if taker.below(3) == 0 else text(document(taker, LINES))
        for _ in range(taker.below(4))
    ]
    file = RequestFile(written("lines.jsonl", b"\n".join([*lines, taker.rest()])), 400)
    done = Done()
    survey = file.survey(done)
    pending = list(file.pending(survey, done))
    assert len(pending) == survey.num_lines
    ids = [line.custom_id for line in pending if line.error is None]
    assert len(ids) == len(set(ids)), "two requests of one custom_id"


_CHECKPOINT = (CheckpointError, UnsupportedModelError)
TARGETS = (
    Target("gguf", _gguf, _CHECKPOINT),
    Target("model_config", _model_config, _CHECKPOINT),
    Target("safetensors", _safetensors, _CHECKPOINT),
    Target("service_classes", _service_classes, (ValueError,)),
    Target("fault_plan", _fault_plan, (ValueError,)),
    Target("api_keys", _api_keys, (ValueError,)),
    Target("batch_lines", _batch_lines, ()),
)

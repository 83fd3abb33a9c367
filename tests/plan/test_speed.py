"""Speeds: the roofline of `simulate` with the same numbers, and the interconnect beside it."""

import json

import pytest

from jaxserve.config.flags import parse_flags
from jaxserve.plan.speed import batches
from jaxserve.sim.workload_command import WorkloadCommand
from tests.plan.models import plan_for, write_config


def test_the_arithmetic_is_that_of_simulate(tmp_path):
    path = write_config(tmp_path)
    workload = tmp_path / "workload.json"
    requests = [{"arrival": 0.0, "prompt_len": 4000, "max_tokens": 96}]
    workload.write_text(json.dumps({"name": "one", "requests": requests}))
    words = ["--cost_model=roofline", "--chip=v5e", "--tensor_parallel_size=4", f"--model_config={path}"]
    words += [f"--workload={workload}", "--max_num_seqs=32", "--max_num_batched_tokens=512"]
    command = WorkloadCommand(parse_flags("simulate", ["simulate", *words]))
    plan = plan_for(path, "v5e-4", max_num_seqs=32)
    own = [line for line in plan.arithmetic if not line.startswith("interconnect")]
    assert own == command.explanation(command.config())
    assert len(plan.arithmetic) == len(own) + 2


def test_the_interconnect_is_a_figure_of_its_own(tmp_path):
    plan = plan_for(write_config(tmp_path), "v5e-4", max_num_seqs=8)
    speed = plan.decode[-1]
    assert speed.rows == 512
    # Two all-reduces of three layers and one of the embedding, in a ring of four, over two ports of 50 GB/s.
    assert speed.interconnect_s == pytest.approx(7 * 512 * 256 * 2 * 2 * 0.75 / 100e9)
    assert speed.total_s == speed.roofline_s + speed.interconnect_s
    assert speed.roofline_s == pytest.approx(5e-4 + max(speed.compute_s, speed.memory_s))
    assert speed.tokens_per_s == pytest.approx(512 / speed.total_s)
    alone = plan_for(write_config(tmp_path), "v5e-1").decode[0]
    assert alone.interconnect_s == 0.0


def test_batches_reach_as_far_as_memory_and_always_the_slots():
    assert batches(8, 10_000) == [1, 8, 32, 128, 512]
    assert batches(64, 40) == [1, 8, 32, 64]
    assert batches(2, 0) == [1, 2]

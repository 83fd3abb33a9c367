"""The same events give the same plans, in every process; and the scheduler needs nothing but the standard library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

RUN = """
import hashlib, random
from jaxserve.core import Priority
from tests.scheduler.harness import Harness, make_config, make_request

draw = random.Random(5)
harness = Harness(make_config(priority_preemption=True, num_pages=40, max_queue_requests=6), lag=LAG)
for index in range(120):
    if draw.random() < 0.6:
        priority = draw.choice([Priority.HIGH, Priority.NORMAL, Priority.LOW])
        harness.add(make_request(f"r{index}", draw.randint(1, 30), draw.randint(0, 9), priority=priority))
    if draw.random() < 0.1:
        harness.abort(f"r{draw.randrange(index + 1)}")
    harness.step()
harness.run()
print(hashlib.sha256(repr((harness.plans, harness.records)).encode()).hexdigest())
"""

PURE = """
import sys
import jaxserve.scheduler
foreign = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - BEFORE
print(sorted(foreign))
"""


def output_of(code: str, hash_seed: str = "0") -> str:
    """Standard output of `code` in a fresh interpreter."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, cwd=ROOT
    )
    return run.stdout.strip()


def test_plans_and_traces_do_not_depend_on_the_hash_seed() -> None:
    for lag in ("0", "1"):
        digests = {output_of(RUN.replace("LAG", lag), seed) for seed in ("0", "1", "4242")}
        assert len(digests) == 1


def test_importing_the_scheduler_loads_the_standard_library_only() -> None:
    # What site packages preload through .pth files is there before any import of ours.
    code = "import sys; BEFORE = {name.partition('.')[0] for name in sys.modules}\n" + PURE
    assert output_of(code) == "['jaxserve']"

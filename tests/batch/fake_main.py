"""`python -m tests.batch.fake_main STEP_S INPUT OUTPUT [ORDER]`: a batch over a `FakeEngine`, for signals and kills.

With ORDER "write_fails" every write after the ninth fails, as a fault plan has it.
"""

import asyncio
import sys

from jaxserve.batch.command import BatchCommand
from jaxserve.batch.console import BatchDisplay
from jaxserve.batch.job import BatchJob, BatchSettings
from jaxserve.batch.tally import EngineFigures
from jaxserve.faults import Fault, FaultPlan, use_fault_plan
from jaxserve.server.console import StartupDisplay
from tests.server.fake_engine import FakeEngine


async def main() -> int:
    step_s, input_file, output_file, *order = sys.argv[1:]
    engine = FakeEngine()
    engine.step_s = float(step_s)
    if order == ["write_fails"]:
        use_fault_plan(FaultPlan([Fault("batch.write", "raise", skip=9, times=None)]))
    job = BatchJob(BatchSettings(input_file, output_file, in_order=order == ["input"], window=8, drain_grace_s=20.0))
    return await BatchCommand(engine, job, StartupDisplay(), BatchDisplay(job.tally, EngineFigures)).run()


sys.exit(asyncio.run(main()))

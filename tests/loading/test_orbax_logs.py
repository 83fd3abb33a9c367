"""What Orbax logs beside raising it is left out; what others log is not."""

import logging

import pytest

from jaxserve.loading.orbax_logs import silence_orbax


@pytest.mark.parametrize(
    ("file", "told"), [("/site-packages/orbax/checkpoint/read.py", False), ("/other/read.py", True)]
)
def test_a_task_s_error_is_told_unless_it_is_orbax_own(caplog, file, told):
    silence_orbax()
    try:
        exec(compile("1 / 0", file, "exec"))
    except ZeroDivisionError:
        logging.getLogger("asyncio").error("Task exception was never retrieved", exc_info=True)
    assert bool(caplog.records) == told

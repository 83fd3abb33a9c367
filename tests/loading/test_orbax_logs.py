"""What Orbax logs beside raising it is left out; what others log is not."""

import logging
import sys
from types import SimpleNamespace

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


@pytest.mark.parametrize(("message", "owner", "told"), [("Event loop is closed", None, False), ("other", None, True)])
def test_what_is_left_of_reads_is_not_told(monkeypatch, message, owner, told):
    calls = []
    monkeypatch.setattr(sys, "unraisablehook", calls.append)
    silence_orbax()
    sys.unraisablehook(SimpleNamespace(object=owner, exc_value=RuntimeError(message), exc_traceback=None))
    assert bool(calls) == told

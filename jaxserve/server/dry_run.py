"""`--dry_run`: the memory plan and the programs to compile, then the end."""

from __future__ import annotations

import json
import sys

from jaxserve.config import EngineConfig
from jaxserve.core import JaxserveError
from jaxserve.server.console import show_plan
from jaxserve.server.log_format import operator_console, tell_failure
from jaxserve.server.start_errors import start_error


def dry_run(config: EngineConfig, log_format: str) -> int:
    """Prints the plan on stdout: a table, or one JSON object with bytes under `log_format` json.

    Returns:
      The exit status: 1 when the engine would not start, after saying why on stderr.
    """
    from jaxserve.engine.dry_run import start_plan

    try:
        plan = start_plan(config)
    except (ValueError, JaxserveError, MemoryError, RuntimeError) as error:
        tell_failure(operator_console(log_format), start_error(error))
        return 1
    if log_format == "json":
        print(json.dumps(plan.as_dict()))
    else:
        show_plan(plan.memory.rows(), sys.stdout)
        show_plan(plan.program_rows(), sys.stdout, about="programs")
    return 0

"""`python -m jaxserve.plan --model_config=NAME --target=SLICE`; see the package and docs/capacity.md."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from absl.flags import FlagValues

from jaxserve.config import EngineConfig
from jaxserve.config.command import run_command
from jaxserve.config.flags import exit_with, parse_flags
from jaxserve.core import JaxserveError

_EFFICIENCY = ("compute_efficiency", "memory_efficiency", "overhead_s")
# Nothing runs here: no accelerator of this machine is taken. The others keep libtpu from looking for one.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
}


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
      The exit status, 0: a plan that does not fit is an answer like any other.

    Raises:
      SystemExit: non-zero on a bad argument, a model that cannot be loaded, or a compiler that is not installed.
    """
    flags = parse_flags("plan", argv)
    for name in ("model_config", "target"):
        if not flags[name].value:
            exit_with(f"give {name}: --model_config=llama-3.1-8b --target=v5e-4")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        _plan(flags)
    except (ValueError, JaxserveError) as error:
        exit_with(str(error))
    except ImportError as error:
        exit_with(f"{error}\n--nocompile plans without a compiler, by arithmetic alone")
    except BrokenPipeError:
        raise  # of the output, not of a file
    except OSError as error:
        exit_with(f"{error.filename}: {error.strerror}")
    return 0


def _plan(flags: FlagValues) -> None:
    # What needs jax, once the environment is set.
    from jaxserve.plan.console import print_plan
    from jaxserve.plan.model_file import find_config, read_model
    from jaxserve.plan.plan import SETTINGS, make_plan
    from jaxserve.plan.targets import find_slice

    where, path = find_slice(flags.target), find_config(flags.model_config)
    settings = {name: flags[name].value for name in SETTINGS}
    settings["tensor_parallel_size"] = flags.tensor_parallel_size or where.num_chips
    plan = make_plan(
        path.parent.name if path.name == "config.json" else path.stem,
        path,
        read_model(path),
        where,
        EngineConfig(**settings),
        compiles=flags.compile,
        context=flags.context,
        efficiency={name: flags[name].value for name in _EFFICIENCY},
        tell=lambda what: print(f"compiling for {where.name}: {what}", file=sys.stderr, flush=True),
    )
    text = json.dumps(plan.as_dict(), indent=1)
    if flags.output is not None:
        Path(flags.output).write_text(text + "\n")
    if flags.json:
        print(text)
    else:
        print_plan(plan)


if __name__ == "__main__":
    run_command(main)

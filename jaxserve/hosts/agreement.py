"""What the processes of an engine agree on before anything runs: settings, versions, checkpoint, memory, programs.

follower reports      leader
what it is given      compares with its own: the same settings, versions and checkpoint
free memory           takes the least of all and tells it
what it will run      compares again: the same pages, shapes and limits
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import jax

from jaxserve import __version__
from jaxserve.config import EngineConfig
from jaxserve.config.hosts_config import LOCAL_SETTINGS
from jaxserve.hosts.follower import Follower
from jaxserve.hosts.leader import Followers
from jaxserve.runtime import ModelRunner


def given(config: EngineConfig, checkpoint: str) -> dict[str, Any]:
    """What a process is given: by name, as JSON has it.

    Args:
      checkpoint: its fingerprint.
    """
    names = [field.name for field in fields(config) if field.name not in LOCAL_SETTINGS]
    versions = {"the version of jaxserve": __version__, "the version of jax": jax.__version__}
    return versions | {"the checkpoint": checkpoint} | {f"--{name}": _plain(getattr(config, name)) for name in names}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def agree_on_given(followers: Followers, own: dict[str, Any]) -> None:
    """Compares what every process is given.

    Raises:
      ValueError: naming the first process and thing that differ.
      HostLostError: a follower is lost.
    """
    for process_id, report in followers.reports().items():
        for name in own | report:
            if own.get(name) != report.get(name):
                raise ValueError(
                    f"{name} is {report.get(name)} in process {process_id} and {own.get(name)} in process 0; all"
                    " processes of an engine need the same"
                )
    followers.decide({})


def agree_on_memory(followers: Followers, free_bytes: int) -> int:
    """The least free memory of a device of any process."""
    least = min(free_bytes, *(int(report["free_bytes"]) for report in followers.reports().values()))
    followers.decide({"free_bytes": least})
    return least


def agree_on_programs(followers: Followers, runner: ModelRunner) -> None:
    """Compares what every process is going to run.

    Raises:
      ValueError: it differs.
      HostLostError: a follower is lost.
    """
    own = programs_of(runner)
    for process_id, report in followers.reports().items():
        for name in own | report:
            if own.get(name) != report.get(name):
                raise ValueError(
                    f"process {process_id} plans {report.get(name)} as {name} and process 0 {own.get(name)}; all"
                    " processes need devices of one kind, and maybe --num_pages and the bucket flags"
                )


def programs_of(runner: ModelRunner) -> dict[str, Any]:
    """What decides which programs a process runs, on what."""
    buckets = [bucket.name for bucket in runner.buckets.all()]
    limits = runner.scheduler_config
    return {
        "num_pages": limits.num_pages,
        "max_model_len": limits.max_model_len,
        "windows of layers": list(limits.windows),
        "compiled sizes": buckets,
    }


def join_agreement(follower: Follower, own: dict[str, Any]) -> None:
    """The follower's part of `agree_on_given`."""
    follower.report(own)
    follower.decision()


def join_memory(follower: Follower, free_bytes: int) -> int:
    """The follower's part of `agree_on_memory`."""
    follower.report({"free_bytes": free_bytes})
    return int(follower.decision()["free_bytes"])

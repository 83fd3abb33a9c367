"""Several hosts: processes that hold one model together (docs/distributed.md)."""

from jaxserve.hosts.agreement import (
    agree_on_given,
    agree_on_memory,
    agree_on_programs,
    given,
    join_agreement,
    join_memory,
    programs_of,
)
from jaxserve.hosts.follower import Follower
from jaxserve.hosts.join import follow, join_processes, lead
from jaxserve.hosts.leader import Followers
from jaxserve.hosts.mirrored_runner import MirroredRunner

__all__ = [
    "Follower",
    "Followers",
    "MirroredRunner",
    "agree_on_given",
    "agree_on_memory",
    "agree_on_programs",
    "follow",
    "given",
    "join_agreement",
    "join_memory",
    "join_processes",
    "lead",
    "programs_of",
]

"""ReplicaChooser: which replica gets a request.

A replica is a candidate while it is available and, where any replica says that it serves the request's model, serves
it. Its load is the requests that this object has given it and that have not ended, and what others have given it
(`report_load`). Of two replicas the less loaded is the one with fewer requests, then fewer tokens, then fewer requests
so far; at last the lower number decides.

    round_robin    the next in turn
    least_loaded   the less loaded
    cache_aware    among those that are not overloaded, the one that has most of the prompt cached

cache_aware: a candidate is overloaded when it has more than `balance_abs_threshold` requests, and more than
`balance_rel_threshold` times as many, as the least loaded. A session goes where its last request went unless that is
overloaded. Otherwise the longest match counts, and matches that fall short of it by less than `cache_threshold` of the
prompt count as equal: the less loaded of those gets the request. So a match below the threshold decides nothing.

What a request costs does not grow with the requests in flight or with what is remembered: some hundred look-ups per
replica at most. Nothing here may choose a replica that is unavailable, or remember more than its bounds.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from jaxserve.config.routing_config import LEAST_LOADED, ROUND_ROBIN, RoutingSettings
from jaxserve.routing.block_table import BlockTable
from jaxserve.routing.prompt_keys import NO_PROMPT, PromptKeys


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What is known of a request before a replica has it.

    Attributes:
      prompt: its beginnings.
      num_tokens: an estimate, prompt and output.
      model: that it names; "": none, any replica will do.
      session: requests of one name belong together; "": of none.
    """

    prompt: PromptKeys = NO_PROMPT
    num_tokens: int = 0
    model: str = ""
    session: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica, and why.

    Attributes:
      reason: "only" (there was one candidate), "session", "prefix", "load" or "round_robin".
      num_matched: blocks of the prompt that it was given before.
    """

    replica: int
    reason: str
    num_matched: int = 0


@dataclass(slots=True)
class _Replica:
    table: BlockTable
    available: bool = False
    limit: int | None = None
    models: frozenset[str] = frozenset()
    in_flight: int = 0
    tokens: int = 0
    from_others: int = 0
    routed: int = 0

    @property
    def load(self) -> int:
        return self.in_flight + self.from_others


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What is counted of a replica.

    Attributes:
      in_flight, tokens: of the requests given to it that have not ended.
      from_others: requests that others gave it.
      routed: requests given to it so far.
      num_blocks: blocks remembered.
    """

    in_flight: int
    tokens: int
    from_others: int
    routed: int
    num_blocks: int


@dataclass(slots=True)
class _Candidates:
    """Replicas that may get a request, each with its number."""

    members: dict[int, _Replica] = field(default_factory=dict)

    def least_loaded(self, among: Iterable[int]) -> int:
        def rank(number: int) -> tuple[int, int, int, int]:
            replica = self.members[number]
            return (replica.load, replica.tokens, replica.routed, number)

        return min(among, key=rank)

    def balanced(self, settings: RoutingSettings) -> list[int]:
        """Those that are not overloaded; the least loaded is always among them."""
        least = min(replica.load for replica in self.members.values())
        highest = max(least + settings.balance_abs_threshold, settings.balance_rel_threshold * least)
        return [number for number, replica in self.members.items() if replica.load <= highest]


class ReplicaChooser:
    """Chooses among a fixed number of replicas, all unavailable at first.

    Args:
      num_replicas: they are numbered from 0.
    """

    def __init__(self, num_replicas: int, settings: RoutingSettings | None = None) -> None:
        self._settings = settings or RoutingSettings()
        self._replicas = [_Replica(BlockTable(self._settings.cache_table_blocks)) for _ in range(num_replicas)]
        self._sessions: OrderedDict[bytes, int] = OrderedDict()
        self._last = num_replicas - 1

    def choose(self, request: RouteRequest, excluded: Collection[int] = ()) -> Choice | None:
        """The replica for a request, None when there is none; changes nothing.

        Args:
          excluded: replicas that it must not be, as they have been tried.
        """
        candidates = self._candidates(request.model, excluded)
        if not candidates.members:
            return None
        keys = request.prompt.keys
        if len(candidates.members) == 1:
            (number,) = candidates.members
            return Choice(number, "only", self._replicas[number].table.match(keys))
        if self._settings.policy == ROUND_ROBIN:
            count = len(self._replicas)
            number = min(candidates.members, key=lambda each: (each - self._last - 1) % count)
            return Choice(number, "round_robin", self._replicas[number].table.match(keys))
        if self._settings.policy == LEAST_LOADED:
            number = candidates.least_loaded(candidates.members)
            return Choice(number, "load", self._replicas[number].table.match(keys))
        return self._cache_aware(request, candidates)

    def begin(self, replica: int, request: RouteRequest) -> None:
        """The request goes to `replica`."""
        chosen = self._replicas[replica]
        chosen.in_flight += 1
        chosen.tokens += request.num_tokens
        chosen.routed += 1
        chosen.table.enter(request.prompt.keys)
        self._last = replica
        if request.session:
            session = _session_key(request.session)
            self._sessions[session] = replica
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._settings.cache_table_blocks:
                self._sessions.popitem(last=False)

    def end(self, replica: int, request: RouteRequest) -> None:
        """What `begin` counted is over, whatever became of it."""
        chosen = self._replicas[replica]
        assert chosen.in_flight, f"replica {replica} has no request in flight"
        chosen.in_flight -= 1
        chosen.tokens -= request.num_tokens

    def set_available(self, replica: int, available: bool, limit: int | None = None) -> None:
        """Whether it may be chosen.

        Args:
          limit: most requests in flight while another may be chosen; None: any number.
        """
        self._replicas[replica].available, self._replicas[replica].limit = available, limit

    def set_models(self, replica: int, models: Collection[str]) -> None:
        """The names that it serves: its model's and its adapters'; none: it is not known."""
        self._replicas[replica].models = frozenset(models)

    def report_load(self, replica: int, num_requests: int) -> None:
        """It has `num_requests`, running or waiting; those beyond this object's own are others'."""
        reported = self._replicas[replica]
        reported.from_others = max(0, num_requests - reported.in_flight)

    def forget(self, replica: int) -> None:
        """It has lost its cache, as a process that began anew has."""
        self._replicas[replica].table.clear()
        self._replicas[replica].from_others = 0

    def load(self, replica: int) -> ReplicaLoad:
        """What is counted of it."""
        of = self._replicas[replica]
        return ReplicaLoad(of.in_flight, of.tokens, of.from_others, of.routed, len(of.table))

    def _candidates(self, model: str, excluded: Collection[int]) -> _Candidates:
        able = {number: each for number, each in enumerate(self._replicas) if each.available and number not in excluded}
        # Where all are at their limits, being one too many is better than being refused.
        below = {n: each for n, each in able.items() if each.limit is None or each.in_flight < each.limit}
        able = below or able
        # A model that none is known to serve goes to any: its answer says so better than this could.
        serving = {number: each for number, each in able.items() if model in each.models} if model else {}
        return _Candidates(serving or able)

    def _cache_aware(self, request: RouteRequest, candidates: _Candidates) -> Choice:
        balanced = candidates.balanced(self._settings)
        keys = request.prompt.keys
        if request.session:
            last = self._sessions.get(_session_key(request.session))
            if last in balanced:
                return Choice(last, "session", self._replicas[last].table.match(keys))
        matches = {number: self._replicas[number].table.match(keys) for number in balanced}
        longest = max(matches.values())
        enough = request.prompt.share(longest) - self._settings.cache_threshold
        near = [number for number, match in matches.items() if request.prompt.share(match) >= enough]
        number = candidates.least_loaded(near)
        reason = "load" if not longest or len(near) == len(candidates.members) else "prefix"
        return Choice(number, reason, matches[number])


def _session_key(session: str) -> bytes:
    return hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=16).digest()

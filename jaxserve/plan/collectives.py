"""Collectives of a compiled program, counted in its text: kinds, how often they run in a step, bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (.*?) ([\w-]+)\((.*)$")
_ARRAY = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")
_CALLED = re.compile(r"(?:calls|to_apply|called_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.-]+)")
_GROUP_LIST = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_GROUP_SHAPE = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_START = 'custom_call_target="AsyncCollectiveStart"'
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONSTANT = re.compile(r"= s(?:32|64)\[\][^ ]* constant\((\d+)\)")

_Found = dict[tuple[str, str, int, bool, int, bool], int]
"""Count by kind, result, bytes, conditional, group and whether the loop's rounds are known."""


@dataclass(frozen=True, slots=True)
class Collective:
    """Equal collectives of a program.

    Attributes:
      kind: one of `KINDS`.
      result: type and shape, as the compiler writes it.
      bytes_each: of the result on one device.
      count: that run in a step.
      conditional: they run only if some request asks for something, as log-probabilities of prompts.
      group: devices that have one together; 0: all.
      trips_known: false: they are in a loop whose number of rounds could not be read, and are counted once.
    """

    kind: str
    result: str
    bytes_each: int
    count: int
    conditional: bool
    group: int = 0
    trips_known: bool = True

    def sent_bytes(self, num_devices: int) -> float:
        """Bytes that each of so many devices sends in all of them, in a ring of its group.

        A ring sends (n - 1) / n of an array's bytes for a gather or a scatter, twice that for an all-reduce, which is
        both (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009).
        """
        ring = self.group or num_devices
        share = (ring - 1) / ring
        whole = self.bytes_each * (ring if self.kind == "reduce-scatter" else 1)
        times = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)
        return self.count * whole * times


def collectives_of(hlo: str) -> list[Collective]:
    """The collectives of a program's text after compilation, the most bytes first."""
    bodies = dict(_computations(hlo))
    entry = next((match[2] for match in _COMPUTATION.finditer(hlo) if match[1]), None)
    found: _Found = {}
    if entry is not None:
        _walk(bodies, entry, 1, False, True, found)
    every = [
        Collective(kind, result, size, count, conditional, group, known)
        for (kind, result, size, conditional, group, known), count in found.items()
    ]
    return sorted(every, key=lambda each: (each.conditional, -each.count * each.bytes_each))


def _computations(hlo: str) -> Iterator[tuple[str, list[str]]]:
    matches = list(_COMPUTATION.finditer(hlo))
    for match in matches:
        end = hlo.find("\n}", match.end())
        yield match[2], hlo[match.end() : end].splitlines()


def _walk(
    bodies: dict[str, list[str]],
    name: str,
    times: int,
    conditional: bool,
    known: bool,
    found: _Found,
    started: frozenset[str] = frozenset(),
) -> None:
    """Adds the collectives of a computation that runs so many times.

    Args:
      started: channels of collectives that another fusion starts. TPU's compiler writes an asynchronous one into the
        fusion that starts it, those that run beside it, and the one that awaits it, under one channel.
    """
    begun = _begun(bodies, name)
    for line in bodies.get(name, ()):
        matched = _INSTRUCTION.match(line)
        if matched is None:
            continue
        result, opcode, rest = matched.groups()
        kind = opcode.removesuffix("-start")
        if kind in KINDS:
            channel = _CHANNEL.search(rest)
            if channel and channel[1] in started:
                continue
            # What starts a gather or a scatter yields its operands too, what starts an all-reduce does not.
            shape, size = _largest(result) if opcode.endswith("-start") and kind != "all-reduce" else _all(result)
            key = (kind, shape, size, conditional, _group(rest), known)
            found[key] = found.get(key, 0) + times
        elif opcode == "while":
            trips = _trips(bodies, rest)
            inner = re.search(r"body=%?([\w.-]+)", rest)
            if inner:
                _walk(bodies, inner[1], times * (trips or 1), conditional, known and trips is not None, found)
        elif opcode == "conditional":
            for branches, single in _BRANCHES.findall(rest):
                for branch in branches.replace("%", "").split(",") if branches else [single]:
                    _walk(bodies, branch.strip(), times, True, known, found)
        elif opcode in ("call", "fusion", "async-start"):
            for called in _CALLED.findall(rest):
                others = begun if opcode == "fusion" and not _begins(bodies, called) else frozenset[str]()
                _walk(bodies, called, times, conditional, known, found, others)


def _group(rest: str) -> int:
    """Devices of each group of a collective; 0 if it names none."""
    if listed := _GROUP_LIST.search(rest):
        return len(listed[1].split(","))
    if shaped := _GROUP_SHAPE.search(rest):
        return int(shaped[1])
    return 0


def _begun(bodies: dict[str, list[str]], name: str) -> frozenset[str]:
    """Channels of the collectives that fusions of a computation start."""
    matches = filter(None, map(_INSTRUCTION.match, bodies.get(name, ())))
    fusions = [called for match in matches if match[2] == "fusion" for called in _CALLED.findall(match[3])]
    starts = [line for called in fusions if _begins(bodies, called) for line in bodies[called]]
    return frozenset(channel for line in starts for channel in _CHANNEL.findall(line))


def _begins(bodies: dict[str, list[str]], name: str) -> bool:
    return any(_START in line for line in bodies.get(name, ()))


def _trips(bodies: dict[str, list[str]], rest: str) -> int | None:
    """Rounds of a loop: as the compiler knows them, or the one number that its condition compares with."""
    if known := _TRIPS.search(rest):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.-]+)", rest)
    if condition is None:
        return None
    numbers = {int(number) for number in _CONSTANT.findall("\n".join(bodies.get(condition[1], ())))}
    return numbers.pop() if len(numbers) == 1 else None


def _arrays(result: str) -> list[tuple[str, int]]:
    """Type and bytes of each array of a result."""
    return [
        (f"{kind}[{dims}]", math.prod(int(size) for size in dims.split(",") if size) * _bits(kind) // 8)
        for kind, dims in _ARRAY.findall(result)
    ]


def _bits(kind: str) -> int:
    return 8 if kind == "pred" else int(_BITS.search(kind)[0])  # type: ignore[index]


def _all(result: str) -> tuple[str, int]:
    arrays = _arrays(result)
    return " + ".join(shape for shape, _ in arrays), sum(size for _, size in arrays)


def _largest(result: str) -> tuple[str, int]:
    """Of what an asynchronous start yields, the result; operands and counters stand beside it."""
    return max(_arrays(result), key=lambda array: array[1])

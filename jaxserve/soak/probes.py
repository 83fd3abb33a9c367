"""Probes: fixed requests whose token ids must be the same alone and amid everything else."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from jaxserve.soak.findings import Findings

COMMON = {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True, "logprobs": 2}
PROBES: tuple[dict[str, Any], ...] = (
    {"prompt": "the sea is wide", "temperature": 0},
    {"prompt": "the sea is wide and ships go by at dawn while gulls cry", "temperature": 0},
    {"prompt": "old harbour walls", "temperature": 0, "repetition_penalty": 1.2},
    {"prompt": "the sea is wide", "temperature": 0.8, "seed": 7},
    {"prompt": "stones near", "temperature": 1.1, "seed": 11, "top_p": 0.9, "presence_penalty": 0.4},
    {"prompt": "grey stones", "temperature": 1.0, "seed": 3, "top_k": 12, "n": 2},
)
NEAR_TIE = 1e-3
"""Log-probabilities that near are equal: which of two such tokens is greedy's is no fault (in float32)."""
TRIES = 50


class Probes:
    """Knows the answers that the probes have on an idle server.

    Args:
      session: of the server.
      findings: that are told.
    """

    def __init__(self, session: aiohttp.ClientSession, findings: Findings) -> None:
        self._session, self._findings = session, findings
        self._solo: list[list[dict[str, Any]]] = []

    async def learn(self) -> None:
        """Asks each alone, twice; on a server that does nothing else.

        Raises:
          RuntimeError: one is not answered, or answered in two ways.
        """
        for number in range(len(PROBES)):
            first, second = await self._ask(number), await self._ask(number)
            if first is None or second is None or _ids(first) != _ids(second):
                raise RuntimeError(f"probe {number} has no answer of its own: {first} and {second}")
            self._solo.append(first)

    async def check(self, number: int, *, must_answer: bool = False) -> None:
        """Asks one amid whatever else goes on. Under faults it may fail, unless `must_answer`, with no other ids."""
        number %= len(PROBES)
        try:
            choices = await self._ask(number)
        except (aiohttp.ClientError, OSError) as error:
            if self._findings.faults_allowed and not must_answer:
                self._findings.count("probe", "failed")
            else:
                self._findings.breach("probe", f"probe {number}: the server did not answer: {error!r}")
            return
        if choices is None:
            self._findings.count("probe", "not answered")
            if must_answer:
                self._findings.breach("probe", f"probe {number} is not answered though nothing else is asked")
            return
        solo = self._solo[number]
        if _ids(choices) == _ids(solo):
            self._findings.count("probe", "same ids")
        elif PROBES[number]["temperature"] == 0 and _is_near_tie(choices[0], solo[0]):
            self._findings.count("probe", "other ids after a near tie")
        else:
            self._findings.count("probe", "other ids")
            self._findings.breach("probe", f"probe {number} gave {_ids(choices)}, alone {_ids(solo)}")

    async def _ask(self, number: int) -> list[dict[str, Any]] | None:
        """Its choices; None when the server refuses it for as long as is tried, or fails it under faults."""
        for _ in range(TRIES):
            async with self._session.post("/v1/completions", json=COMMON | PROBES[number]) as response:
                if response.status == 200:
                    choices: list[dict[str, Any]] = (await response.json())["choices"]
                    return choices
                may_fail = self._findings.faults_allowed and response.status >= 500
                if response.status != 429 and not may_fail:
                    self._findings.breach("probe", f"probe {number}: {response.status} {await response.text()}")
                    return None
            await asyncio.sleep(0.3)
        return None


def _ids(choices: list[dict[str, Any]]) -> list[list[int]]:
    return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: int(choice["index"]))]


def _is_near_tie(choice: dict[str, Any], solo: dict[str, Any]) -> bool:
    """Whether the first token that differs was as likely as the one it stands for; one that is not there is none."""
    pairs = zip(choice["token_ids"], solo["token_ids"], strict=False)
    place = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
    if place is None or len(choice["token_ids"]) != len(solo["token_ids"]):
        return False
    best = sorted(solo["logprobs"]["top_logprobs"][place].values(), reverse=True)
    return len(best) > 1 and best[0] - best[1] < NEAR_TIE

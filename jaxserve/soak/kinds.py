"""What clients of a soak ask for: the bodies of requests by kind, drawn from a seeded generator.

`KINDS` says how often each kind comes. A body is of `/v1/completions` unless its kind says otherwise; prompts are
words, so that they are text to any tokenizer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

WORDS = [
    "the",
    "sea",
    "is",
    "wide",
    "and",
    "ships",
    "go",
    "by",
    "at",
    "dawn",
    "while",
    "gulls",
    "cry",
    "over",
    "grey",
    "stones",
    "near",
    "old",
    "harbour",
    "walls",
]
SHARED = tuple(" ".join(WORDS[(7 * start + step) % len(WORDS)] for step in range(12)) for start in range(4))
"""Beginnings that prompts share, for the prefix cache."""
TENANTS = ("", "alice", "bob", "carol")
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}
REGEXES = ("[ab]{1,6}", "(yes|no|perhaps)", "[0-9]{2}:[0-9]{2}")

KINDS = {
    "stream": 18,
    "whole": 10,
    "chat": 8,
    "choices": 5,
    "logprobs": 5,
    "stop": 6,
    "schema": 4,
    "regex": 4,
    "cancel": 10,
    "slow_reader": 4,
    "deadline": 3,
    "grpc": 8,
    "grpc_cancel": 3,
    "grpc_deadline": 2,
    "tokenize": 3,
    "invalid": 10,
    "grpc_invalid": 2,
    "duplicate": 2,
}
"""Kinds by weight."""
BROKEN: tuple[dict[str, Any], ...] = (
    {"prompt": [-1]},
    {"prompt": [2**31]},
    {"prompt": [1.5]},
    {"prompt": []},
    {"prompt": None},
    {"prompt": [[]]},
    {"max_tokens": -1},
    {"max_tokens": 10**18},
    {"max_tokens": "8"},
    {"temperature": -1},
    {"temperature": "0.7"},
    {"top_p": 1.5},
    {"n": 0},
    {"n": 10**6},
    {"logprobs": 21},
    {"stop": [""]},
    {"stop": ["x"] * 17},
    {"seed": 2**64},
    {"priority": 2**70},
    {"logit_bias": {"x": 1}},
    {"model": "another"},
    {"service_class": "nobody"},
    {"stream_options": 3},
    {"suffix": "x"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
    {"structured_outputs": {"regex": "(["}},
    {"prompt": "a " * 200_000},
)
"""Fields that make a body wrong, each in its own way."""
BROKEN_BYTES = (
    b"",
    b"{",
    b"[]",
    b'{"prompt": NaN}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud83d"}',
    b"[" * 5000,
    b'{"prompt": "a", "temperature": 1e400}',
)
"""Bodies that are no JSON object."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a client does.

    Attributes:
      at: seconds after the beginning of the soak.
      number: of the action; its request's id is made of it.
      kind: one of `KINDS`.
      body: of the request; for "grpc" kinds, "prompt", "max_tokens", "seed" and "temperature" alone.
      raw: bytes sent instead of `body`.
      leave_after_s: seconds after which the client goes away; None: it stays.
    """

    at: float
    number: int
    kind: str
    body: dict[str, Any] = field(default_factory=dict)
    raw: bytes | None = None
    leave_after_s: float | None = None

    @property
    def request_id(self) -> str:
        """That the client gives the request."""
        return f"soak-{self.number}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long requests are.

    Attributes:
      max_words: most words of a prompt.
      max_tokens: most output tokens.
      service_classes: that the server has.
    """

    max_words: int = 12
    max_tokens: int = 40
    service_classes: tuple[str, ...] = ()


def draw(rng: random.Random, at: float, number: int, sizes: Sizes) -> Action:
    """The next action."""
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    return make(rng, kind, at, number, sizes)


def make(rng: random.Random, kind: str, at: float, number: int, sizes: Sizes) -> Action:
    """An action of a kind."""
    body: dict[str, Any] = {"prompt": _prompt(rng, sizes), "max_tokens": _length(rng, sizes.max_tokens)} | _sampling(
        rng
    )
    raw = leave = None
    match kind:
        case "stream" | "duplicate":
            body |= _terms(rng, sizes) | _streamed()
            body["ignore_eos"] = rng.random() < 0.5
        case "whole":
            body |= _terms(rng, sizes)
            if rng.random() < 0.2:
                body["prompt"] = [_prompt(rng, sizes) for _ in range(2)]
        case "chat":
            body |= _terms(rng, sizes) | {"messages": [{"role": "user", "content": body.pop("prompt")}]}
            if rng.random() < 0.7:
                body |= _streamed()
        case "choices":
            body |= _terms(rng, sizes) | {"n": rng.randint(2, 4)} | (_streamed() if rng.random() < 0.7 else {})
        case "logprobs":
            body |= {"logprobs": rng.randint(0, 5)}
            body |= _streamed() if rng.random() < 0.5 else {"prompt_logprobs": rng.randint(0, 3)}
        case "stop":
            stops = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=rng.randint(1, 2))) for _ in range(3)]
            body |= {"stop": stops, "include_stop_str_in_output": rng.random() < 0.3} | _streamed()
        case "schema":
            body |= {"structured_outputs": {"json": SCHEMA}, "max_tokens": 60}
            body |= _streamed() if rng.random() < 0.5 else {}
        case "regex":
            body |= {"structured_outputs": {"regex": rng.choice(REGEXES)}, "max_tokens": 30}
        case "cancel":
            leave = rng.expovariate(4.0)
            body |= _terms(rng, sizes) | {"max_tokens": 4 * sizes.max_tokens, "ignore_eos": True}
            body |= _streamed() if rng.random() < 0.6 else {}
            if rng.random() < 0.3:
                body["n"] = rng.randint(2, 4)
        case "slow_reader":
            body |= _streamed() | {"max_tokens": 2 * sizes.max_tokens, "ignore_eos": True}
        case "deadline":
            body |= {"deadline_s": rng.choice((0.001, 0.05, 0.5)), "ignore_eos": True} | _streamed()
        case "grpc_cancel":
            leave = rng.expovariate(4.0)
        case "grpc_deadline":
            leave = rng.choice((0.001, 0.1, 0.3))
        case "invalid":
            if rng.random() < 0.3:
                raw = rng.choice(BROKEN_BYTES)
            else:
                body |= (_streamed() if rng.random() < 0.5 else {}) | rng.choice(BROKEN)
    return Action(at, number, kind, body, raw, leave)


def _prompt(rng: random.Random, sizes: Sizes) -> str:
    beginning = [rng.choice(SHARED)] if rng.random() < 0.4 else []
    num_words = _length(rng, sizes.max_words)
    return " ".join(beginning + rng.choices(WORDS, k=num_words))


def _length(rng: random.Random, most: int) -> int:
    """Mostly short, now and then the most there is."""
    return most if rng.random() < 0.1 else rng.randint(1, max(most // 2, 1))


def _sampling(rng: random.Random) -> dict[str, Any]:
    match rng.randrange(4):
        case 0:
            return {"temperature": 0}
        case 1:
            return {"temperature": 0.8, "seed": rng.randrange(2**31), "top_p": 0.9}
        case 2:
            return {"temperature": 1.2, "top_k": 20, "presence_penalty": 0.5, "repetition_penalty": 1.1}
    return {}


def _terms(rng: random.Random, sizes: Sizes) -> dict[str, Any]:
    terms: dict[str, Any] = {}
    if tenant := rng.choice(TENANTS):
        terms["tenant"] = tenant
    if sizes.service_classes and rng.random() < 0.6:
        terms["service_class"] = rng.choice(sizes.service_classes)
    elif rng.random() < 0.4:
        terms["priority"] = rng.randint(-2, 2)
    if rng.random() < 0.1:
        terms["cache_salt"] = "salt"
    return terms


def _streamed() -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}}

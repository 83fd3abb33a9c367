"""SamplingParams: how one request's tokens are chosen and when it stops.

Names follow vLLM's `SamplingParams`. A value is checked once, when the object is made, so that
everything downstream may trust it; checks that need the model (vocabulary size, context length)
are in `jaxserve.engine.validation`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxserve.core.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 20
"""Most alternatives per position, as OpenAI and vLLM have it; it fixes the shape of the sampler's output."""
MAX_NUM_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_ALLOWED_TOKEN_IDS = 8192
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 256
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Immutable sampling settings of one request.

    Attributes:
      n: completions per prompt, 1..128; choice `i` samples with a seed derived from (`seed`, i).
      max_tokens: most output tokens; None: as many as the context holds. 0 only scores the prompt.
      min_tokens: of the first so many output tokens none is EOS or of `stop_token_ids`, and no stop string that begins
        in their text is seen.
      temperature: 0..100; values under `GREEDY_TEMPERATURE` are greedy.
      top_k: keep the k likeliest tokens; 0 or -1: all; ties with the k-th are kept.
      top_p: keep the smallest set of likeliest tokens whose probability reaches p, in [0, 1];
        under 1e-6 it keeps the likeliest only.
      min_p: drop tokens under `min_p` times the likeliest one's probability, in [0, 1].
      presence_penalty, frequency_penalty: in [-2, 2], over output tokens only.
      repetition_penalty: in [0.01, 100], over prompt and output: positive logits divided, negative multiplied.
      seed: -2**63 .. 2**63-1; None: the engine draws one.
      logit_bias: token id -> additive bias in [-100, 100], at most 1024 entries.
      allowed_token_ids: the only ids that may be sampled, EOS among them or not; None: all.
      bad_words: words that are never sampled, neither alone nor after a space: the last token of a word is barred where
        its other tokens stand right before it in the output.
      stop: strings that end the output; not part of the text unless `include_stop_str_in_output`.
      stop_token_ids: ids that end the output; like EOS they are in `token_ids`, not in the text.
      ignore_eos: EOS ids are ordinary tokens.
      logprobs: None: none; k in 0..20: the chosen token's and the k likeliest, of the model's raw
        distribution (before bias, penalties and temperature).
      prompt_logprobs: the same for each prompt position.
      skip_special_tokens: leave special tokens out of the text.
      shown_special_ids: special tokens that are text all the same, for those who parse it.
      structured_outputs: what the output's text must be; None: anything.

    Raises:
      ValueError: naming field, rule and value.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_ids: frozenset[int] = frozenset()
    structured_outputs: StructuredOutputs | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        if isinstance(self.stop, str):
            set_(self, "stop", (self.stop,))
        set_(self, "stop", tuple(self.stop or ()))
        set_(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        set_(self, "logit_bias", dict(self.logit_bias or {}))
        set_(self, "bad_words", (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words or ()))
        if self.allowed_token_ids is not None:
            set_(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        _check_int("n", self.n, 1, MAX_NUM_CHOICES)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0, 2**63 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**63 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}; it must be at most max_tokens ({self.max_tokens})")
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, -1, 2**63 - 1)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.seed is not None:
            _check_int("seed", self.seed, SEED_MIN, SEED_MAX)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, 0, MAX_LOGPROBS)
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputs):
            got = type(self.structured_outputs).__name__
            raise ValueError(f"structured_outputs must be a StructuredOutputs; got {got}")
        self._check_stops()
        self._check_bias()
        self._check_allowed()
        self._check_bad_words()

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop has {len(self.stop)} strings; the limit is {MAX_STOP_STRINGS}")
        for text in self.stop:
            if not isinstance(text, str):
                raise ValueError(f"stop must hold strings; got {text!r}")
            if not text:
                raise ValueError('stop has an empty string ""; leave it out or set stop to null')
            if len(text) > MAX_STOP_STRING_CHARS:
                raise ValueError(f"a stop string has {len(text)} characters; the limit is {MAX_STOP_STRING_CHARS}")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids has {len(self.stop_token_ids)} ids; the limit is {MAX_STOP_TOKEN_IDS}")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, 2**31 - 1)

    def _check_bias(self) -> None:
        if len(self.logit_bias) > 1024:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} entries; the limit is 1024")
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias token id", token_id, 0, 2**31 - 1)
            _check_float(f"logit_bias of token {token_id}", bias, -100.0, 100.0)

    def _check_allowed(self) -> None:
        allowed = self.allowed_token_ids
        if allowed is None:
            return
        if not allowed:
            raise ValueError("allowed_token_ids is empty; leave it out to allow every token")
        if len(allowed) > MAX_ALLOWED_TOKEN_IDS:
            raise ValueError(f"allowed_token_ids has {len(allowed)} ids; the limit is {MAX_ALLOWED_TOKEN_IDS}")
        if set(map(type, allowed)) != {int}:
            other = next(token_id for token_id in allowed if type(token_id) is not int)
            raise ValueError(f"allowed_token_ids must hold integers; got {other!r}")

    def _check_bad_words(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise ValueError(f"bad_words has {len(self.bad_words)} words; the limit is {MAX_BAD_WORDS}")
        for word in self.bad_words:
            if not isinstance(word, str):
                raise ValueError(f"bad_words must hold strings; got {word!r}")
            if not word.strip():
                raise ValueError(f"bad_words has {word!r}; a word must have a character that is no blank")
            if len(word) > MAX_BAD_WORD_CHARS:
                raise ValueError(f"bad_words has a word of {len(word)} characters; the limit is {MAX_BAD_WORD_CHARS}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1 or self.top_p < GREEDY_TOP_P

    @property
    def edits_logits(self) -> bool:
        """Whether the row needs the dense per-slot state: bias, barred tokens, penalties or held-off stop ids."""
        return bool(
            self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.min_tokens > 0
        )


GREEDY_TOP_P = 1e-6
"""A `top_p` under this is greedy: no vocabulary is so large that the likeliest token has less."""

GREEDY_TEMPERATURE = 2e-3
"""Temperatures under this are greedy: dividing by them only overflows what argmax decides anyway."""


def choice_seed(seed: int, index: int) -> int:
    """Seed of choice `index` of a request with n > 1; choice 0 keeps the request's seed.

    The stride is the odd 64-bit golden-ratio constant of SplitMix64, so no two of a request's
    choices share a seed.
    """
    return (seed + index * 0x9E3779B97F4A7C15) & (2**64 - 1)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer; got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must be in [{low}, {high}]")


def _check_float(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number; got {value!r}")
    if not math.isfinite(value) or not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must be in [{low:g}, {high:g}]")

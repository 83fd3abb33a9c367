"""What a caller gets back, shaped as vLLM's RequestOutput and CompletionOutput."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of one token.

    Attributes:
      logprob: in the model's raw distribution.
      rank: 1 for the likeliest; None where it was not ranked (beyond the alternatives asked for).
      decoded_token: its text alone.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Instants of the engine's monotonic clock, seconds; None where it did not happen."""

    arrived_at: float
    first_scheduled_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion.

    Attributes:
      index: choice number.
      text: decoded output, without stop string.
      token_ids: every sampled token, EOS or stop id included.
      logprobs: one dict per token, id -> Logprob: the chosen token and the asked alternatives.
      finish_reason: "stop", "length", "abort", "expired", "error", "unfollowable"; None while running.
      stop_reason: the stop string or stop id that ended it; None for EOS and length.
      error: why, where `finish_reason` is "unfollowable", or "error" and the cause is known.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None


@dataclass(slots=True)
class RequestOutput:
    """The completions of one prompt.

    Attributes:
      prompt_logprobs: per prompt position a dict id -> Logprob; the first is None.
      num_cached_tokens: prompt tokens taken from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = True

"""Record: what happened to one request of a load. Standard library only, so that drivers of peers can use it."""

from __future__ import annotations

from dataclasses import dataclass, field

COMPLETED, REFUSED, FAILED = "completed", "refused", "failed"


@dataclass(slots=True)
class Record:
    """One request; instants are seconds of one monotonic clock.

    Attributes:
      due_at: when it was to be sent; every latency counts from here, so a late client hides nothing.
      num_prompt, max_tokens: tokens sent and asked for.
      sent_at: when it was sent.
      token_at: of each event with a token, in order.
      num_output: tokens that came out, as the server counted them.
      ended_at: of the last token, the refusal or the failure.
      outcome: `COMPLETED`, `REFUSED` (429 or 503) or `FAILED`; "" while it runs.
      status: of the HTTP answer; 0: none came.
      error: why it was refused or failed.
      retry_after_s: what a refusal said.
    """

    due_at: float
    num_prompt: int
    max_tokens: int
    sent_at: float = 0.0
    token_at: list[float] = field(default_factory=list)
    num_output: int = 0
    ended_at: float = 0.0
    outcome: str = ""
    status: int = 0
    error: str = ""
    retry_after_s: float | None = None

    @property
    def ttft_s(self) -> float:
        """Arrival to first token."""
        return self.token_at[0] - self.due_at

    @property
    def e2e_s(self) -> float:
        """Arrival to last token."""
        return self.token_at[-1] - self.due_at

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (tokens - 1); None for a single token."""
        return (self.token_at[-1] - self.token_at[0]) / (self.num_output - 1) if self.num_output > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        """Between successive token events."""
        return [later - earlier for earlier, later in zip(self.token_at, self.token_at[1:], strict=False)]

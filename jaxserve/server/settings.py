"""What the HTTP front can be told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Settings of the HTTP front.

    Attributes:
      api_key: needed on every path but the probes; None: open.
      max_body_bytes: largest request body.
      metrics_compat: "vllm" exports metrics under vLLM's names too; "" does not.
      profile_dir: folder for the traces of `/start_profile`; "": none are written.
    """

    api_key: str | None = None
    max_body_bytes: int = 8 << 20
    metrics_compat: str = ""
    profile_dir: str = ""

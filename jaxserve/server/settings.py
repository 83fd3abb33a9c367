"""What the HTTP front can be told."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config.api_keys import ApiKey


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Settings of the HTTP front.

    Attributes:
      api_keys: one is needed on every path but the probes; none: open.
      guard_probes: the probes need one too.
      allowed_origins: of web pages that may read answers (CORS); "*": all; none: CORS is off.
      allowed_hosts: names that requests may be for, see `host_guard`; none: all.
      max_body_bytes: largest request body.
      metrics_compat: "vllm" exports metrics under vLLM's names too; "" does not.
      enable_playground: `/` is the playground.
      allow_runtime_lora_updating: LoRA adapters may be loaded and unloaded.
      runtime_lora_root: the folder that such adapters lie in; "": any.
      profile_dir: folder for the traces of `/start_profile`; "": none are written.
    """

    api_keys: tuple[ApiKey, ...] = ()
    guard_probes: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 8 << 20
    metrics_compat: str = ""
    profile_dir: str = ""
    enable_playground: bool = True
    allow_runtime_lora_updating: bool = False
    runtime_lora_root: str = ""

"""The sides of a disaggregated server, made of its flags."""

from __future__ import annotations

from absl.flags import FlagValues

from jaxserve.disaggregation import PrefillServer, PrefillSettings, RemotePrefill, RemotePrefillSettings


def disaggregation_sides(flags: FlagValues, token: str) -> tuple[RemotePrefill | None, PrefillServer | None]:
    """A decode server's side, a prefill server's, or neither.

    Raises:
      OSError: the prefill server's address cannot be had.
    """
    max_bytes = int(flags.kv_transfer_space * (1 << 30))
    if flags.disaggregation == "decode":
        settings = RemotePrefillSettings(
            workers=flags.prefill_workers,
            token=token,
            min_tokens=flags.remote_prefill_min_tokens,
            timeout_s=flags.remote_prefill_timeout_s,
            fallback=flags.local_prefill_fallback,
            max_bytes=max_bytes,
            host=flags.kv_host,
            transport=flags.kv_transfer,
        )
        return RemotePrefill(settings), None
    if flags.disaggregation == "prefill":
        return None, PrefillServer(
            PrefillSettings(
                host=flags.kv_host,
                port=flags.kv_port,
                token=token,
                max_bytes=max_bytes,
                hold_s=flags.kv_hold_s,
                transport=flags.kv_transfer,
            )
        )
    return None, None

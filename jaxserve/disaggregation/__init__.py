"""Disaggregation: prefill servers compute prompts, decode servers the rest; K/V pages move between them.

`remote_prefill.py` is the decode server's side, `prefill_server.py` the other, `frames.py` what they say to each other.
"""

from jaxserve.disaggregation.prefill_server import PrefillServer, PrefillSettings
from jaxserve.disaggregation.remote_prefill import RemotePrefill, RemotePrefillSettings

__all__ = ["PrefillServer", "PrefillSettings", "RemotePrefill", "RemotePrefillSettings"]

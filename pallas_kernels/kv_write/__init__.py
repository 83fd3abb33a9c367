"""Writing of new keys and values into the paged KV pool."""

from pallas_kernels.kv_write.api import choose_write, write_kv
from pallas_kernels.kv_write.quantise import quantise

__all__ = ["choose_write", "quantise", "write_kv"]

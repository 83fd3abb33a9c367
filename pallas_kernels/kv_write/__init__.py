"""Writing of new keys and values into the paged KV pool."""

from pallas_kernels.kv_write.api import write_kv

__all__ = ["write_kv"]

"""Paged attention: one contract, an implementation per kind of device."""

from pallas_kernels.paged_attention.api import IMPLEMENTATIONS, choose_implementation, paged_attention

__all__ = ["IMPLEMENTATIONS", "choose_implementation", "paged_attention"]

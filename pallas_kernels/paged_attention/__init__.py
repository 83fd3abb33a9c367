"""Paged attention: one contract, an implementation per kind of device."""

from pallas_kernels.common.pool import QUANTISED_DTYPES, check_page_table
from pallas_kernels.paged_attention.api import (
    IMPLEMENTATIONS,
    KERNELS,
    LATENT_IMPLEMENTATIONS,
    choose_implementation,
    paged_attention,
)

__all__ = [
    "IMPLEMENTATIONS",
    "KERNELS",
    "LATENT_IMPLEMENTATIONS",
    "QUANTISED_DTYPES",
    "check_page_table",
    "choose_implementation",
    "paged_attention",
]

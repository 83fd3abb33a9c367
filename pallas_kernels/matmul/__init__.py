"""Products with matrices that are packed for the processor's inner loop."""

from pallas_kernels.matmul.api import can_pack, is_packed, pack, packed_columns, packed_matmul

__all__ = ["can_pack", "is_packed", "pack", "packed_columns", "packed_matmul"]

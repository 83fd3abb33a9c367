"""Products with matrices that are packed for the processor's inner loop."""

from pallas_kernels.matmul.api import PackedMatrix, can_pack, is_packed, pack, packed_columns, packed_matmul
from pallas_kernels.matmul.quantised import (
    Blocks,
    QuantisedForm,
    QuantisedMatrix,
    abstract_quantised,
    can_quantise,
    form_of,
    pack_quantised,
    quantise,
)

__all__ = [
    "Blocks",
    "PackedMatrix",
    "QuantisedForm",
    "QuantisedMatrix",
    "abstract_quantised",
    "can_pack",
    "can_quantise",
    "form_of",
    "is_packed",
    "pack",
    "pack_quantised",
    "packed_columns",
    "packed_matmul",
    "quantise",
]

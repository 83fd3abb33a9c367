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
from pallas_kernels.matmul.scaled import (
    ScaledForm,
    ScaledMatrix,
    abstract_scaled,
    can_scale,
    num_bytes,
    put_columns,
    scale_columns,
    scaled_form,
    scaled_matmul,
    scaled_rows,
)

__all__ = [
    "Blocks",
    "PackedMatrix",
    "QuantisedForm",
    "QuantisedMatrix",
    "ScaledForm",
    "ScaledMatrix",
    "abstract_quantised",
    "abstract_scaled",
    "can_pack",
    "can_quantise",
    "can_scale",
    "form_of",
    "is_packed",
    "num_bytes",
    "pack",
    "pack_quantised",
    "packed_columns",
    "packed_matmul",
    "put_columns",
    "quantise",
    "scale_columns",
    "scaled_form",
    "scaled_matmul",
    "scaled_rows",
]

"""Writes a GGUF file with all its tensors in 16 bits, for peers that keep the file's own number format.

Usage: python tools/peers/write_gguf.py MODEL.gguf OUT.gguf    with the project's Python
"""

from __future__ import annotations

import sys

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize

KEPT_F32 = ("norm.weight", "rope_freqs.weight")
"""Ends of the names of tensors that are float32 in such files."""


def main(source: str, target: str) -> None:
    """Copies metadata and tensors, matrices as float16."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        sub_type = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type)
    writer.add_file_type(1)  # mostly F16
    for tensor in reader.tensors:
        data = dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape.tolist())))
        is_f32 = tensor.name.endswith(KEPT_F32)
        writer.add_tensor(
            tensor.name,
            np.ascontiguousarray(data, np.float32 if is_f32 else np.float16),
            raw_dtype=GGMLQuantizationType.F32 if is_f32 else GGMLQuantizationType.F16,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])

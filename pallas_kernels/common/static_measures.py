"""What a compiler says about a kernel: registers, spills, shared memory, instructions of its main loop.

The compilers write these into files when asked to by the environment, which they read once: call `ask_for`
before anything is compiled.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_TPU_KERNEL = re.compile("paged_attention|write_kv")
"""In the names of what is measured; XLA's own programs are not."""
_TPU_COLUMNS = "MATMUL, MATPUSH, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU"


@dataclass(frozen=True, slots=True)
class Measures:
    """Of one kernel; 0 for what its compiler does not tell.

    Attributes:
      registers: per thread (GPU).
      spilled: bytes of spill stores and loads (GPU), or vector stores and loads to spill slots (TPU).
      smem_bytes: shared memory of a block (GPU).
      instructions: of the whole kernel; bundles on TPU.
      loop: of the loop over K/V blocks, the branches that exclude each other all counted; 0: not found.
    """

    registers: int = 0
    spilled: int = 0
    smem_bytes: int = 0
    instructions: int = 0
    loop: int = 0


def ask_for(folder: Path) -> None:
    """Makes the compilers of this process write their measures into `folder`."""
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = os.environ["MOSAIC_GPU_DUMP_RESOURCES"] = "1"
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"


def take(folder: Path) -> list[Measures]:
    """Reads the measures of the kernels compiled since the last call, and empties the folder."""
    found = [_gpu(path) for path in sorted(folder.glob("*.ptxas"))]
    utilizations = sorted(folder.glob("*final_hlo-static-per-bundle-utilization.txt"))
    found += [_tpu(path) for path in utilizations if _TPU_KERNEL.search(path.name)]
    for path in folder.iterdir():
        path.unlink()
    return found


def _gpu(ptxas: Path) -> Measures:
    text = ptxas.read_text()
    resources = ptxas.with_suffix(".resources.txt")
    scratch = re.search(r"smem_scratch_bytes=(\d+)", resources.read_text()) if resources.exists() else None
    sass = ptxas.with_suffix(".sass_ctrl")
    code = sass.read_text() if sass.exists() else ""
    return Measures(
        registers=max(map(int, re.findall(r"Used (\d+) registers", text)), default=0),
        spilled=sum(map(int, re.findall(r"(\d+) bytes spill", text))),
        smem_bytes=int(scratch[1]) if scratch else 0,
        instructions=len(_INSTRUCTION.findall(code)),
        loop=gpu_loop(code),
    )


_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s")
_LABEL = re.compile(r"^\.(L_x_\d+):")
_BRANCH = re.compile(r"/\*([0-9a-f]{4,5})\*/.*\bBRA `\(\.(L_x_\d+)\)")
_MATRIX = re.compile(r"/\*([0-9a-f]{4,5})\*/.*\b(?:HMMA|HGMMA|IMMA|QMMA|UTCHMMA|FFMA)\b")


def gpu_loop(code: str) -> int:
    """Instructions of the shortest backward branch that spans matrix products, in SASS `code`; 0: none."""
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    products: list[int] = []
    waiting: list[str] = []
    for line in code.splitlines():
        if label := _LABEL.match(line):
            waiting.append(label[1])
        elif address := _INSTRUCTION.search(line):
            at = int(address[1], 16) // 16
            labels.update(dict.fromkeys(waiting, at))
            waiting = []
            if branch := _BRANCH.search(line):
                branches.append((at, branch[2]))
            if _MATRIX.search(line):
                products.append(at)
    spans = [
        at - labels[label] + 1
        for at, label in branches
        if labels.get(label, at + 1) <= at and any(labels[label] <= product <= at for product in products)
    ]
    return min(spans, default=0)


def _tpu(utilization: Path) -> Measures:
    rows = [line.split() for line in utilization.read_text().splitlines()]
    counts = [[int(x) for x in row] for row in rows if len(row) == 11 and all(x.isdigit() for x in row)]
    header = utilization.read_text().split("\n", 2)[1].strip()
    if header != _TPU_COLUMNS:
        raise ValueError(f"{utilization} has columns {header}; this reads {_TPU_COLUMNS}")
    bundles = counts[1:]  # the first row is what a bundle holds at most
    code = next(utilization.parent.glob(f"{utilization.name.split('-', 1)[0]}-*[0-9]-final_bundles.txt"))
    return Measures(
        spilled=sum(bundle[7] + bundle[9] for bundle in bundles),
        instructions=len(bundles),
        loop=tpu_loop(code.read_text()),
    )


_BUNDLE = re.compile(r"^\s*0x[0-9a-f]+\s*(?:[A-Z]+\s*)*: (>*)")


def tpu_loop(code: str) -> int:
    """Bundles at the depth of loops at which most matrix products are, below the grid's; 0: no such loop."""
    bundles = [(line, match) for line in code.splitlines() if (match := _BUNDLE.match(line))]
    depths = [(len(match[1]), "vmatmul" in line or "vmatpush" in line) for line, match in bundles]
    products = [depth for depth, product in depths if product and depth > 1]
    if not products:
        return 0
    wanted = max(set(products), key=products.count)
    return sum(depth == wanted for depth, _ in depths)

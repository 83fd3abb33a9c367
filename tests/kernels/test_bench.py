"""bench.py runs and writes figures."""

from __future__ import annotations

import json

import jax
import pytest

from pallas_kernels.common.deviceless import TARGETS, compile_for, missing
from pallas_kernels.paged_attention import bench


def test_small_bench_writes_a_figure_per_shape(tmp_path, capsys):
    assert bench.main(["--small", "--repeats=1", f"--output={tmp_path / 'f.json'}"]) == 0
    record = json.loads((tmp_path / "f.json").read_text())
    assert [figure["contender"] for figure in record["figures"]] == ["native_cpu", "xla"] * 2
    assert all(figure["microseconds"] > 0 and not figure["note"] for figure in record["figures"])
    assert record["copy_bytes_per_s"] > 0
    assert "decode b2 c64" in capsys.readouterr().out


def test_shapes_have_names_of_their_own():
    names = [spec.name for spec in bench.specs(small=False)]
    assert len(set(names)) == len(names)


@pytest.mark.gpu_compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("rival", ["triton, deprecated", "cudnn, contiguous"])
def test_rivals_compile_for_a_gpu(rival, monkeypatch):
    """What is timed beside the kernels there; nothing of it can run here."""
    target = TARGETS["sm_90a"]
    if missing(target):
        pytest.skip(missing(target))
    triton = rival.startswith("triton")
    model = dict(num_heads=8, num_kv_heads=2, head_dim=128)
    spec = bench.decode_spec(2, 256, **model) if triton else bench.prefill_spec(1, 256, 256, **model)
    inputs = bench.make_inputs(spec, "mosaic_gpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    function, rest = bench.contenders(spec, "mosaic_gpu", inputs)[rival]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (inputs[0], rest))
    assert compile_for(target, lambda q, rest: function(0, q, rest), shapes).as_text()

"""bench.py runs and writes figures."""

from __future__ import annotations

import json

from pallas_kernels.paged_attention import bench


def test_small_bench_writes_a_figure_per_shape(tmp_path, capsys):
    assert bench.main(["--small", "--repeats=1", f"--output={tmp_path / 'f.json'}"]) == 0
    record = json.loads((tmp_path / "f.json").read_text())
    assert [figure["contender"] for figure in record["figures"]] == ["cpu", "cpu"]
    assert all(figure["microseconds"] > 0 and not figure["note"] for figure in record["figures"])
    assert record["copy_bytes_per_s"] > 0
    assert "decode b2 c64" in capsys.readouterr().out


def test_shapes_have_names_of_their_own():
    names = [spec.name for spec in bench.specs(small=False)]
    assert len(set(names)) == len(names)

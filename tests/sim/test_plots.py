"""Plots: what is drawn, in which files, and what is said without matplotlib."""

import pytest

from jaxserve.sim import plots
from jaxserve.sim.timeline import Span


def test_plots_without_matplotlib_name_the_extra(simulate, workload, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert simulate(f"--workload={workload}", f"--plots={tmp_path / 'plots'}") == (2, None)
    assert 'plots needs matplotlib, which is not installed; install the extra: pip install "jaxserve[plots]"' in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("form", ["svg", "png"])
def test_a_run_and_a_sweep_are_drawn(simulate, workload, tmp_path, form):
    pytest.importorskip("matplotlib", reason="the plots extra is not installed")
    folder = tmp_path / "plots"
    words = (f"--workload={workload}", f"--plots={folder}", f"--plot_format={form}")
    assert simulate(*words)[0] == 0
    assert simulate(*words, "--sweep_rates=0.1,1")[0] == 0
    search = (
        "--find_rate",
        "--slo_ttft_s=10",
        "--slo_share=0.9",
        "--sweep=max_num_seqs=1,2",
        "--sweep=policy=fcfs,sjf",
    )
    assert simulate(*words, *search)[0] == 0
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(files) == {f"{name}.{form}" for name in ("timeline", "ttft_cdf", "sweep", "ranking")}
    start = {"svg": b"<?xml", "png": b"\x89PNG"}[form]
    assert all(content.startswith(start) for content in files.values())


def test_steps_show_pauses_and_many_spans_become_bins():
    spans = [Span(0.0, 1.0, 1.0, 1, 2, 6, 5, 1, 2), Span(4.0, 5.0, 1.0, 1, 3, 0, 7, 0, 3)]
    edges, (decode, prefill, pages, queue) = plots._bins(spans)
    assert edges.tolist() == [0.0, 1.0, 4.0, 5.0]
    assert (decode.tolist(), prefill.tolist()) == ([2, 0, 3], [6, 0, 0])
    assert (pages.tolist(), queue.tolist()) == ([5, 0, 7], [1, 0, 0])
    many = [Span(float(i), i + 1.0, 1.0, 1, 2, i % 2, i, 0, 2) for i in range(3000)]
    edges, (decode, prefill, pages, _) = plots._bins(many)
    assert len(edges) == len(decode) + 1 == 301
    assert decode.tolist() == [2.0] * 300
    assert prefill.mean() == pytest.approx(0.5)
    assert (pages[0], pages[-1]) == (9, 2999)


def test_a_run_in_which_everybody_is_refused_is_drawn(simulate, workload, tmp_path):
    pytest.importorskip("matplotlib", reason="the plots extra is not installed")
    words = (f"--workload={workload}", f"--plots={tmp_path / 'plots'}", "--max_model_len=5")
    assert simulate(*words)[1]["figures"]["rejected_by_reason"] == {"never_fits": 60}
    assert simulate(*words, "--sweep_rates=1,2")[0] == 0

"""bench compare_modes: the steps that batches take, worked by hand, and a run of both modes."""

import json

import pytest

from jaxserve.bench.__main__ import main
from jaxserve.bench.compare_modes import continuous_steps, static_steps
from jaxserve.bench.load.requests import read_items


def test_steps_worked_by_hand():
    outputs = [6, 1, 2, 3, 4]
    assert static_steps(outputs, 2) == 6 + 3 + 4
    # Slot 0: 6, then 4; slot 1: 1, 2, 3.
    assert continuous_steps(outputs, 2) == 10
    assert static_steps(outputs, 8) == continuous_steps(outputs, 8) == 6


@pytest.mark.parametrize(("name", "ratio"), [("w1", 2.75), ("w2", 4.34)])
def test_the_ratio_that_steps_alone_allow(name, ratio):
    outputs = [item.max_tokens for item in read_items(name)[1]]
    assert round(static_steps(outputs, 8) / continuous_steps(outputs, 8), 2) == ratio


@pytest.fixture
def workload(tmp_path):
    """Two static batches of two, each with one long output; continuously the second slot takes all short ones."""
    outputs = [40, 4, 4, 40]
    path = tmp_path / "uneven.json"
    requests = [{"prompt_ids": [number + 1] * 8, "max_tokens": count} for number, count in enumerate(outputs)]
    path.write_text(json.dumps({"name": "uneven", "requests": requests}))
    return path


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("at_once", [True, False])
def test_both_modes_are_measured(tiny_model_dir, workload, tmp_path, monkeypatch, capsys, at_once):
    if not at_once:
        monkeypatch.setattr("jaxserve.bench.compare_modes._free_bytes", lambda: 0)
    output = tmp_path / "figures.json"
    words = (f"--model={tiny_model_dir}", f"--workload={workload}", "--slots=2", "--dtypes=float32", "--runs=1")
    main(["bench", "compare_modes", *words, f"--output={output}"])
    document = json.loads(output.read_text())
    modes = {result["batching"]: result for result in document["results"]}
    assert (modes["static"]["decode_steps"], modes["continuous"]["decode_steps"]) == (80, 48)
    # Of each output the first token comes with its prompt; then there is a prompt's own iteration.
    assert modes["continuous"]["iterations"] < 60 < modes["static"]["iterations"] <= 82
    assert modes["continuous"]["slot_utilisation"] > 0.8 > 0.6 > modes["static"]["slot_utilisation"]
    speeds = [modes[mode]["output_tokens_per_s"] for mode in ("continuous", "static")]
    assert document["ratio_continuous_over_static"] == pytest.approx(speeds[0] / speeds[1])
    assert document["ratio_decode_steps_allow"] == pytest.approx(80 / 48)
    assert document["equal_outputs_share"] == 1.0
    assert document["engines_at_once"] is at_once
    assert "ratio_continuous_over_static:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "compare_modes needs a workload"),
        (("--workload=w3",), "compare_modes needs a workload"),
        (("--workload=w1", "--slots=8,32"), "slots is 8,32; compare_modes takes one"),
        (("--workload=w1", "--dtypes=float32,bfloat16"), "dtypes is float32,bfloat16; compare_modes takes one"),
    ],
)
def test_a_mistake_is_named(capsys, words, message):
    with pytest.raises(SystemExit) as raised:
        main(["bench", "compare_modes", *words])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err

"""bench quality: scored positions, and figures beside the engine's own prompt log-probabilities."""

import json

import numpy as np
import pytest

from jaxserve import SamplingParams
from jaxserve.bench import quality
from jaxserve.bench.__main__ import main

TEXT = "the cat sat on the mat and the dog lay down by the door while rain fell on the roof of the house " * 4
WINDOW = 150


def test_windows_overlap_by_half():
    assert quality.windows_of(range(11), 4) == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7], [6, 7, 8, 9]]
    assert quality.windows_of(range(5), 5) == [[0, 1, 2, 3, 4]]
    with pytest.raises(ValueError, match="the text has 3 tokens; window is 4"):
        quality.windows_of(range(3), 4)


@pytest.mark.usefixtures("own_cache")
def test_perplexity_is_that_of_the_prompt_log_probabilities(tiny_model_dir, tmp_path):
    llm = quality.make_llm(str(tiny_model_dir), "--dtype=float32", WINDOW)
    windows = quality.windows_of(llm.engine.tokenizer.encode(TEXT, add_special_tokens=False), WINDOW)
    figures = quality.score(llm, windows, tmp_path, is_reference=True)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scored = []
    for window, output in zip(windows, llm.generate(windows, params, use_tqdm=False), strict=True):
        scored += [output.prompt_logprobs[i][window[i]].logprob for i in range(WINDOW // 2, WINDOW)]
    assert figures["positions"] == len(scored)
    assert figures["perplexity"] == pytest.approx(np.exp(-np.mean(scored)), rel=1e-4)
    assert figures["kl_mean"] == 0 and figures["same_best"] == 1


@pytest.mark.usefixtures("own_cache")
def test_smaller_numbers_are_further_from_the_reference(tiny_model_dir, tmp_path, capsys):
    text, output = tmp_path / "text", tmp_path / "figures.json"
    text.write_text(TEXT)
    settings = ["--dtype=float32", "--dtype=bfloat16", "--dtype=float32 --kv_cache_dtype=int8"]
    words = [f"--settings={each}" for each in settings]
    main(
        ["bench", "quality", f"--model={tiny_model_dir}", f"--text={text}", "--window=64", *words, f"--output={output}"]
    )
    rows = json.loads(output.read_text())["results"]
    assert [row["settings"] for row in rows] == settings
    assert rows[0]["kl_mean"] == 0
    for row in rows[1:]:
        assert 0 < row["kl_mean"] < 0.1 and row["kl_mean"] <= row["kl_p99"]
    assert rows[1]["weights_mib"] == pytest.approx(rows[0]["weights_mib"] / 2, rel=0.01)
    assert rows[2]["kv_bytes_per_token"] < rows[0]["kv_bytes_per_token"] / 2
    assert "KL mean" in capsys.readouterr().out


def test_a_text_that_is_not_there_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", "quality", f"--text={tmp_path / 'no'}"])
    assert end.value.code == 2
    assert f"--text: {tmp_path / 'no'} cannot be read" in capsys.readouterr().err

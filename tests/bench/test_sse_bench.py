"""bench sse: every token is an event of its own, and the front's time is told for both routes."""

import json

from jaxserve.bench.__main__ import main


def test_it_measures_both_routes_and_writes_json(tmp_path, capsys):
    output = tmp_path / "figures.json"
    main(["bench", "sse", "--streams=2,5", "--output_tokens=7", "--runs=1", f"--output={output}"])
    results = json.loads(output.read_text())["results"]
    assert [(r["route"], r["streams"], r["events"]) for r in results] == [
        ("completions", 2, 2 * 8),  # seven tokens and [DONE]
        ("completions", 5, 5 * 8),
        ("chat", 2, 2 * 9),  # and the role
        ("chat", 5, 5 * 9),
    ]
    for result in results:
        assert 0 < result["front_us_per_token"] < 1e5 and result["tokens_per_s"] > 0
    assert "front us/token" in " ".join(capsys.readouterr().out.split())

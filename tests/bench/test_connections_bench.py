"""`bench connections` on a small scale: every stream and call ends with its own ids."""

import json

import pytest

from jaxserve.bench import connections
from jaxserve.bench.__main__ import main


@pytest.mark.slow  # figures of a server that tests beside it slow down
def test_every_connection_is_served(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(connections, "SLOTS", 8)
    monkeypatch.setattr(connections, "SETTLE_S", 0.2)
    output = tmp_path / "connections.json"
    words = ("--model=tiny", "--connections=12", "--output_tokens=4", f"--output={output}")
    assert not main(["bench", "connections", *words])
    results = json.loads(output.read_text())["results"]
    assert [result["right"] for result in results] == [12, 8, 12, 8, 12], capsys.readouterr().out

"""The fuzzed readers on saved inputs and on bytes of hypothesis: no exception but those they promise, in time.

An input in corpus/TARGET is one that once broke it. `tools/fuzz/run` goes on from here for as long as it is let.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tools.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
SAVED = sorted(path for path in CORPUS.glob("*/*"))
QUICK = settings(max_examples=60, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def test_every_saved_input_has_a_target() -> None:
    assert SAVED and {path.parent.name for path in SAVED} <= TARGETS.keys()


@pytest.mark.parametrize("path", SAVED, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_once_broke_a_reader_does_no_more(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_bytes_of_any_kind_are_taken_or_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_ALLOW_FAULTS", "1")

    @QUICK
    @given(st.binary(max_size=120))
    def run(data: bytes) -> None:
        TARGETS[name](data)

    run()

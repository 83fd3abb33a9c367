"""Steps fail on either side of a pair: outputs are those of one engine, and both sides go on."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.core import SamplingParams
from tests.disaggregation.pair import Pair, prompts

SEEDED = SamplingParams(max_tokens=12, temperature=0.8, seed=11, ignore_eos=True)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("method", ["dispatch", "sample", "collect"])
def test_a_step_that_fails_changes_no_output(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, side: str, method: str
) -> None:
    wanted = prompts(21)
    here = pair.generate(wanted, SEEDED, remotely=False)
    pair.decode.reset_prefix_cache()
    pair.prefill.reset_prefix_cache()
    engine = pair.prefill if side == "prefill" else pair.decode
    runner: Any = engine.engine.runner
    original, calls = getattr(runner, method), []

    def fail(*args: Any) -> Any:
        calls.append(args)
        if len(calls) in (2, 6):
            if method == "dispatch" and len(calls) == 6:
                runner._pool.pages.delete()
            raise RuntimeError("the step fails")
        return original(*args)

    count = pair.prefill_count if side == "prefill" else pair.count
    before = count("step_recoveries_total")
    monkeypatch.setattr(runner, method, fail)
    assert pair.generate(wanted, SEEDED) == here
    # The decode side keeps off a prefill server for a while once a prompt has failed there.
    assert count("step_recoveries_total") - before >= (1 if side == "prefill" else 2)
    assert engine.state == "ready"

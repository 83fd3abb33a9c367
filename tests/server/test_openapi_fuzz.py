"""schemathesis on a real server, from its own /openapi.json: right and wrong requests of every route.

No 5xx but those that are described, answers as described, wrong data refused; and the server is as before. The quick
run is the same each time; the long one is `tools/clients/schemathesis_check.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import load_all_checks
from schemathesis.generation import GenerationMode

CHECKER = Path(__file__).parents[2] / "tools" / "clients" / "schemathesis_check.py"
LONG_RUN_S = 600
DESCRIBED = (501, 503, 504)
"""No such ability, not ready, the request's own deadline passed."""
BETWEEN_FIELDS = ("positive_data_acceptance",)
"""Rules between fields, as stream_options that needs stream, are not in the description."""


@pytest.fixture(scope="module")
def checks():
    """Every check that can be made of an answer."""
    load_all_checks()
    found = schemathesis.checks.CHECKS.get_all()
    return [check for check in found if check.__name__ not in (*BETWEEN_FIELDS, "not_a_server_error")]


@pytest.fixture
def document(server):
    """The server's own description."""
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
def test_every_route_answers_as_it_is_described(document, checks, alive, mode):
    operations = [each.ok() for each in document.get_all_operations()]
    assert len(operations) > 15
    quick = settings(
        max_examples=6,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    num_sent = 0
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
            continue  # there is nothing to get wrong

        @quick
        @given(operation.as_strategy(generation_mode=mode))
        def run(case):
            nonlocal num_sent
            response = case.call(timeout=30)
            num_sent += 1
            assert response.status_code < 500 or response.status_code in DESCRIBED, response.text
            case.validate_response(response, checks=checks)

        run()
    assert num_sent > 40
    alive()


@pytest.mark.slow
@pytest.mark.timeout(LONG_RUN_S + 600)
def test_every_route_for_ten_minutes(server):
    done = subprocess.run([sys.executable, str(CHECKER), server.url, str(LONG_RUN_S)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]

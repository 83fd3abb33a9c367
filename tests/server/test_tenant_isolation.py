"""What one tenant's requests leave in the prefix cache is neither found nor told to another."""

import pytest

from jaxserve.config.api_keys import ApiKey
from jaxserve.server.settings import HttpSettings
from tests.server.running import RunningServer

KEYS = (ApiKey("operator"), ApiKey("a-key", "alice"), ApiKey("b-key", "bob"))
PROMPT = "The sea is wide and the sky above it wider, said the old man to the boy."


@pytest.fixture(scope="module")
def server(make_tiny_engine):
    engine = make_tiny_engine()
    server = RunningServer(lambda: engine, HttpSettings(api_keys=KEYS))
    yield server
    server.stop()


def cached(server, key, **fields):
    """Prompt tokens that the answer says were cached."""
    with server.client() as client:
        body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0} | fields
        answer = client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_tenants_share_no_cached_pages(server):
    assert cached(server, "a-key") == 0
    assert (own := cached(server, "a-key")) > 0
    assert cached(server, "b-key") == 0
    assert cached(server, "operator") == 0
    assert cached(server, "operator", tenant="alice") == own  # an operator's key may name any
    assert cached(server, "b-key") == own


def test_no_salt_spells_another_tenant(server):
    assert cached(server, "a-key", cache_salt="salt") == 0
    for salt in ("5:alicesalt", "alicesalt", "salt", "\x00salt", "alice\x00salt"):
        assert cached(server, "b-key", cache_salt=salt) == 0
    assert cached(server, "operator", tenant="alices", cache_salt="alt") == 0
    assert cached(server, "a-key", cache_salt="salt") > 0


def test_resetting_the_cache_is_the_operators(server):
    with server.client() as client:
        for key, status in (("a-key", 403), ("operator", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert client.post("/reset_prefix_cache", headers=headers).status_code == status

"""The playground without a browser: what is served, and that it admits nothing from elsewhere."""

import base64
import hashlib
import re

import pytest

from jaxserve.config.api_keys import ApiKey
from jaxserve.server.playground import page_and_policy
from jaxserve.server.settings import HttpSettings
from tests.server.fake_engine import FakeEngine
from tests.server.running import RunningServer, error_of


def hashes(tag):
    """The CSP sources of the page's inline elements of a kind."""
    inline = re.findall(rf"<{tag}>(.*?)</{tag}>", page_and_policy()[0], re.DOTALL)
    return {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in inline}


def directives():
    return {words[0]: set(words[1:]) for words in (part.split() for part in page_and_policy()[1].split(";"))}


def test_the_page_is_served_with_a_policy_that_admits_its_own_parts_alone(fake_client):
    response = fake_client.get("/")
    assert response.status_code == 200 and response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"] == page_and_policy()[1]
    assert response.headers["x-content-type-options"] == "nosniff" and response.headers["x-frame-options"] == "DENY"
    allowed = directives()
    assert allowed["script-src"] == hashes("script") and len(hashes("script")) == 2
    assert allowed["style-src"] == hashes("style") and len(hashes("style")) == 1
    assert allowed["default-src"] == allowed["frame-ancestors"] == allowed["base-uri"] == {"'none'"}
    assert allowed["connect-src"] == {"'self'"}


def test_the_page_loads_nothing_from_elsewhere_and_writes_no_markup():
    page = page_and_policy()[0]
    assert "{{" not in page and not re.search(r"https?://", page)
    assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function)", page)
    assert not re.search(r"<[^>]+\s(on\w+|style)=", page), "handlers and styles in attributes would be blocked"


@pytest.mark.parametrize("guard_probes", [False, True])
def test_with_keys_the_page_is_open_and_what_it_asks_for_is_not(guard_probes):
    server = RunningServer(FakeEngine, HttpSettings(api_keys=(ApiKey("k"),), guard_probes=guard_probes))
    try:
        with server.client() as client:
            assert client.get("/").status_code == 200
            for path in ("/debug/state", "/v1/models", "/openapi.json"):
                error_of(client.get(path), 401)
    finally:
        server.stop()


def test_it_can_be_turned_off():
    server = RunningServer(FakeEngine, HttpSettings(enable_playground=False, api_keys=(ApiKey("k"),)))
    try:
        with server.client() as client:
            error_of(client.get("/"), 401)
            assert error_of(client.get("/", headers={"Authorization": "Bearer k"}), 404)["code"] == "path_not_found"
    finally:
        server.stop()

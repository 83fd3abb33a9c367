"""Two real engines behind a router."""

from __future__ import annotations

import socket

import openai
import pytest

from jaxserve.router.settings import HealthSettings, RouterSettings
from tests.router.upstreams import RunningRouter
from tests.server.conftest import BASELINE
from tests.server.running import RunningServer, metric_samples, raw_request, until


@pytest.fixture(scope="module")
def servers(tiny_server, make_tiny_engine):
    """The shared server and another."""
    engine = make_tiny_engine()
    other = RunningServer(lambda: engine)
    yield tiny_server, other
    other.stop()


@pytest.fixture
def router(servers):
    router = RunningRouter([each.url for each in servers], RouterSettings(health=HealthSettings(0.05, 5.0)))
    router.until_up(2)
    yield router
    router.stop()
    for each in servers:
        until(lambda each=each: each.engine.engine.clean, 5, "idle-clean")


def counted(server, name, label=""):
    with server.client() as client:
        samples = metric_samples(client.get("/metrics").text)
        return sum(value for sample, value in samples if sample.startswith(f"jaxserve:{name}{{") and label in sample)


def test_the_openai_client_streams_through_the_router(router):
    client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="none")
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**chat).choices[0].message.content
    pieces = [
        choice.delta.content or ""
        for chunk in client.chat.completions.create(**chat, stream=True)
        for choice in chunk.choices
    ]
    assert "".join(pieces) == whole
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    client.close()


def test_answers_are_the_replicas_own(router, servers):
    with router.client() as through:
        answers = [through.post("/v1/completions", json=BASELINE).json()["choices"] for _ in range(4)]
    with servers[0].client() as direct:
        assert answers == [direct.post("/v1/completions", json=BASELINE).json()["choices"]] * 4


def test_conversations_find_their_pages_again(router, servers):
    before = [counted(each, "prefix_cache_hits_total") for each in servers]
    with router.client() as client:
        for turn in range(3):
            for user in "abcd":
                prompt = f"{user} tells " + "of the sea, " * 6 + "and on " * turn
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
                assert client.post("/v1/completions", json=body).status_code == 200
    hits = [counted(each, "prefix_cache_hits_total") - was for each, was in zip(servers, before, strict=True)]
    # Every turn but a user's first finds the full pages of the one before: 64 of its tokens at least.
    assert sum(hits) >= 4 * 2 * 64
    assert all(hits), "all went to one replica"
    assert router.metric("choices_total", reason="prefix") >= 8


def test_a_disconnect_reaches_the_engine(router, servers):
    def num_live():
        return sum(each.engine.load.running + each.engine.load.waiting for each in servers)

    aborted = [counted(each, "request_success_total", "abort") for each in servers]
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 100, "ignore_eos": True, "stream": True}
    for each in servers:
        each.engine.engine.gate.clear()
    try:
        with socket.create_connection(("127.0.0.1", router.port)) as connection:
            connection.sendall(raw_request("/v1/completions", body))
            until(lambda: num_live() == 1, 5, "the request at an engine")
    finally:
        until(lambda: router.metric("client_disconnects_total") == 1, 5, "the disconnect at the router")
        for each in servers:
            each.engine.engine.gate.set()
    until(lambda: num_live() == 0, 5, "the abort")
    until(
        lambda: sum(counted(each, "request_success_total", "abort") for each in servers) == sum(aborted) + 1,
        5,
        "its count",
    )

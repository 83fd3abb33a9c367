"""What the fronts do with prompts that other servers compute: they wait for them, also when they drain."""

import asyncio
from dataclasses import replace

import pytest

from jaxserve.core import RejectedError, Rejection, SamplingParams
from jaxserve.server.errors import ApiError, to_api_error
from jaxserve.server.service import GenerationService
from tests.server.fake_engine import FakeEngine

PARAMS = SamplingParams(max_tokens=2)


class FakeRemote:
    """Gives every prompt pages named after it, once `go_on` is set; or the refusal it has."""

    def __init__(self, refusal=None):
        self.go_on = asyncio.Event()
        self.refusal = refusal
        self.released = []

    async def fetch(self, submissions):
        await self.go_on.wait()
        if self.refusal is not None:
            raise RejectedError(self.refusal)
        return [replace(each, kv=f"pages of {each.request_id}") for each in submissions]

    def release(self, submissions):
        self.released += [each.kv for each in submissions]


class Recorder(FakeEngine):
    """Keeps what is submitted, or refuses it."""

    def __init__(self, refusal=None):
        super().__init__()
        self.taken = []
        self.refusal = refusal

    def submit_all(self, submissions):
        if self.refusal is not None:
            raise RejectedError(self.refusal)
        self.taken += submissions
        return super().submit_all(submissions)


def submit(service):
    return service.submit([[1, 2, 3]], lambda _: PARAMS, "r")


def test_pages_go_to_the_engine_with_their_prompt_and_a_drain_waits_for_them():
    async def run():
        engine, remote = Recorder(), FakeRemote()
        service = GenerationService(engine, remote_prefill=remote)
        fetching = asyncio.create_task(submit(service))
        await asyncio.sleep(0)
        draining = asyncio.create_task(service.drain(60))
        await asyncio.sleep(0.05)
        assert not draining.done() and not engine.taken
        with pytest.raises(ApiError, match="shutting down"):
            service.check_ready()
        remote.go_on.set()
        (stream,) = await fetching
        stream.cancel()
        await draining
        assert [each.kv for each in engine.taken] == ["pages of r"] and not remote.released
        service.close()

    asyncio.run(run())


def test_a_drain_waits_no_longer_than_it_may():
    async def run():
        service = GenerationService(Recorder(), remote_prefill=FakeRemote())
        fetching = asyncio.create_task(submit(service))
        await asyncio.sleep(0)
        await service.drain(0.05)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        service.close()

    asyncio.run(run())


def test_pages_of_a_prompt_that_the_engine_refuses_are_forgotten():
    async def run():
        remote = FakeRemote()
        remote.go_on.set()
        service = GenerationService(Recorder(Rejection("queue_full_requests", "full", 1.0)), remote_prefill=remote)
        with pytest.raises(RejectedError, match="full"):
            await submit(service)
        assert remote.released == ["pages of r"]
        await service.drain(60)
        service.close()

    asyncio.run(run())


def test_without_a_prefill_server_and_without_fallback_the_answer_is_503():
    async def run():
        remote = FakeRemote(Rejection("prefill_unavailable", "no prefill server computed the prompt", 1.0))
        remote.go_on.set()
        service = GenerationService(Recorder(), remote_prefill=remote)
        with pytest.raises(RejectedError) as caught:
            await submit(service)
        error = to_api_error(caught.value)
        assert (error.http_status, error.code, error.headers()) == (503, "prefill_unavailable", {"Retry-After": "1"})
        service.close()

    asyncio.run(run())

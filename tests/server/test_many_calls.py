"""Many connections and calls at once: none is dropped by what lies beneath the server's own queue."""

import asyncio
import resource

import grpc
import pytest

from jaxserve.server.listening import raise_open_files_limit
from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc
from tests.server.fake_engine import FakeEngine
from tests.server.running import RunningServer

CALLS = 2500


@pytest.fixture
def roomy_server():
    server = RunningServer(FakeEngine)
    server.engine.max_live = CALLS
    yield server
    server.stop()


def test_a_burst_of_grpc_calls_is_taken_whole(roomy_server):
    async def burst():
        options = [[("grpc.use_local_subchannel_pool", 1), ("test.channel", number)] for number in range(20)]
        channels = [grpc.aio.insecure_channel(roomy_server.grpc_address, each) for each in options]
        stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]

        async def call(number):
            request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=2))
            return [message async for message in stubs[number % len(stubs)].Generate(request)]

        found = await asyncio.gather(*map(call, range(CALLS)), return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in channels))
        return found

    found = asyncio.run(burst())
    codes = [each.code() for each in found if isinstance(each, grpc.aio.AioRpcError)]
    assert not codes, f"{len(codes)} of {CALLS} calls ended with {set(codes)}"
    assert all(messages[-1].HasField("usage") for messages in found)


def test_the_limit_of_open_files_is_raised_to_what_the_system_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        raise_open_files_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

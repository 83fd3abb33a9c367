"""The gRPC front over the real engine, beside HTTP."""

import threading
import time

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from jaxserve.config.api_keys import ApiKey
from jaxserve.server.grpc_service import HEALTH_PERIOD_S
from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc, orchestrator_pb2, orchestrator_pb2_grpc
from jaxserve.server.settings import HttpSettings
from tests.server.conftest import BASELINE
from tests.server.fake_engine import FakeEngine
from tests.server.running import RunningServer, until

SAMPLING = pb.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(server.grpc_address) as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return inference_pb2_grpc.InferenceStub(channel)


def request(**fields):
    return pb.GenerateRequest(**{"text": "The sea", "sampling": SAMPLING} | fields)


def failure(call):
    """Status and metadata of a call that must fail."""
    with pytest.raises(grpc.RpcError) as failed:
        list(call)
    return failed.value.code(), failed.value.details(), dict(failed.value.trailing_metadata() or ())


def test_a_stream_has_the_same_tokens_as_http(stub, client, baseline):
    responses = list(stub.Generate(request(request_id="abc")))
    assert [token for response in responses for token in response.token_ids] == baseline
    http = client.post("/v1/completions", json=BASELINE).json()
    assert "".join(response.text for response in responses) == http["choices"][0]["text"]
    assert responses[0].prompt.request_id == "abc" and list(responses[0].prompt.token_ids) == list(b"The sea")
    assert not any(response.HasField("prompt") for response in responses[1:])
    reasons = [response.finish_reason for response in responses]
    assert reasons[-1] == pb.FINISH_REASON_LENGTH and not any(reasons[:-1])
    usage = responses[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 8)


def test_token_ids_and_chat_are_inputs_too(stub, baseline, client):
    ids = pb.TokenIds(ids=list(b"The sea"))
    by_ids = list(stub.Generate(pb.GenerateRequest(token_ids=ids, sampling=SAMPLING)))
    assert [token for response in by_ids for token in response.token_ids] == baseline
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    (first, *_) = stub.Generate(pb.GenerateRequest(chat=chat, sampling=SAMPLING))
    tokens = client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()["tokens"]
    assert list(first.prompt.token_ids) == tokens == list(stub.Tokenize(pb.TokenizeRequest(chat=chat)).token_ids)


def test_choices_logprobs_and_stop_reasons_are_carried(stub):
    sampling = pb.SamplingParams(n=3, temperature=1, seed=5, max_tokens=6, logprobs=2, prompt_logprobs=1)
    responses = list(stub.Generate(request(sampling=sampling)))
    assert {response.index for response in responses} == {0, 1, 2}
    for response in responses:
        assert len(response.logprobs) == len(response.token_ids)
        for token_id, position in zip(response.token_ids, response.logprobs, strict=True):
            assert position.chosen.token_id == token_id and len(position.top) >= 2
    (scores,) = [response.prompt_scores for response in responses if response.HasField("prompt_scores")]
    assert [position.chosen.token_id for position in scores.positions] == list(b"he sea")
    text = "".join(response.text for response in stub.Generate(request()))
    stop = pb.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=[text[2:4]])
    last = list(stub.Generate(request(sampling=stop)))[-1]
    assert last.finish_reason == pb.FINISH_REASON_STOP and last.stop_string == text[2:4]


@pytest.mark.parametrize(
    ("fields", "status", "word"),
    [
        ({"sampling": pb.SamplingParams(temperature=-1)}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        ({"sampling": pb.SamplingParams(temperature=float("nan"))}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        ({"sampling": pb.SamplingParams(max_tokens=2**64 - 1)}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
        ({"sampling": pb.SamplingParams(max_tokens=10**9)}, grpc.StatusCode.INVALID_ARGUMENT, "128"),
        ({"sampling": pb.SamplingParams(n=0)}, grpc.StatusCode.INVALID_ARGUMENT, "n is 0"),
        ({"sampling": pb.SamplingParams(logit_bias={264: 1})}, grpc.StatusCode.INVALID_ARGUMENT, "logit_bias"),
        ({"text": ""}, grpc.StatusCode.INVALID_ARGUMENT, "no tokens"),
        ({"token_ids": pb.TokenIds(ids=[264])}, grpc.StatusCode.INVALID_ARGUMENT, "264"),
        ({"model": "gpt-7"}, grpc.StatusCode.NOT_FOUND, "gpt-7"),
        ({"request_id": "a b"}, grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
    ],
)
def test_bad_requests_have_a_status_and_a_message(stub, alive, fields, status, word):
    fields = {"text": None} | fields if "token_ids" in fields else fields
    code, details, _ = failure(stub.Generate(request(**fields)))
    assert code == status and word in details
    alive()


def test_an_empty_request_is_refused(stub):
    code, details, _ = failure(stub.Generate(pb.GenerateRequest()))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "input" in details


@pytest.fixture
def ends(server, monkeypatch):
    """What became of the requests, in order."""
    ends = []
    monkeypatch.setattr(server.engine.engine.monitor, "on_request_end", lambda record: ends.append(record.outcome))
    return ends


@pytest.mark.parametrize("timeout_s", [0.2, 0.95, 1.05])
def test_a_deadline_ends_generation_as_expired(stub, server, ends, timeout_s):
    engine = server.engine.engine
    engine.gate.clear()
    code, _, _ = failure(stub.Generate(request(), timeout=timeout_s))
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: ends == ["expired"], 2, "it has expired")


@pytest.mark.parametrize("timeout_s", [None, 30])
def test_a_cancelled_call_ends_generation_as_aborted(stub, server, ends, timeout_s):
    engine = server.engine.engine
    engine.gate.clear()
    call = stub.Generate(request(), timeout=timeout_s)
    until(lambda: engine.has_work, what="submitted")
    call.cancel()
    until(lambda: ends == ["abort"], 2, "it was aborted")


def test_abort_ends_a_request_of_either_front(stub, server):
    engine = server.engine.engine
    engine.gate.clear()
    answers = []

    def post():
        with server.client() as client:
            answers.append(client.post("/v1/completions", json=BASELINE | {"request_id": "over-http"}).json())

    thread = threading.Thread(target=post)
    thread.start()
    until(lambda: "over-http" in server.engine._streams, what="live")
    assert stub.Abort(pb.AbortRequest(request_id="over-http")).aborted
    assert not stub.Abort(pb.AbortRequest(request_id="over-http")).aborted
    thread.join(10)
    assert answers[0]["choices"][0]["finish_reason"] == "abort"


def test_tokenize_detokenize_and_model_info(stub):
    tokens = stub.Tokenize(pb.TokenizeRequest(text="Café"))
    assert list(tokens.token_ids) == list("Café".encode()) and tokens.max_model_len == 128
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids)).text == "Café"
    info = stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model, info.max_model_len, info.state) == ("tiny", 128, "ready")
    assert info.vocab_size >= 261 and info.has_chat_template and info.eos_token_ids


def test_health_and_reflection_answer(channel):
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "jaxserve.v1.Inference"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    database = ProtoReflectionDescriptorDatabase(channel)
    assert "jaxserve.v1.Inference" in database.get_services()
    service = DescriptorPool(database).FindServiceByName("jaxserve.v1.Inference")
    assert {m.name for m in service.methods} == {"Generate", "Tokenize", "Detokenize", "Abort", "GetModelInfo"}


def test_fields_choose_tokens_as_over_http(stub, client, baseline):
    allowed = pb.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, allowed_token_ids=pb.TokenIds(ids=[5, 9]))
    (tokens,) = [[t for r in stub.Generate(request(sampling=allowed)) for t in r.token_ids]]
    assert len(tokens) == 4 and set(tokens) <= {5, 9}
    (last, *_) = reversed(list(stub.Generate(request(truncate_prompt_tokens=3))))
    assert last.usage.prompt_tokens == 3
    code, details, _ = failure(stub.Generate(request(truncate_prompt_tokens=0)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "truncate_prompt_tokens is 0" in details
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    chat = pb.ChatMessages(messages=[pb.ChatMessage(**message) for message in messages], continue_final_message=True)
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert (
        list(stub.Tokenize(pb.TokenizeRequest(chat=chat)).token_ids)
        == client.post("/tokenize", json=body).json()["tokens"]
    )


def test_settings_that_leave_no_token_are_the_callers_mistake(stub, alive):
    allowed = pb.TokenIds(ids=[97, 98])
    at_once = {"structured_outputs": pb.StructuredOutputs(regex="c+"), "allowed_token_ids": allowed}
    later = {"allowed_token_ids": allowed, "bad_words": ["aa", "ab", "ba", "bb"]}
    for fields, words in ((at_once, "allowed_token_ids leaves no token"), (later, "leave no token after 1 output")):
        code, details, _ = failure(stub.Generate(request(sampling=pb.SamplingParams(max_tokens=8, **fields))))
        assert code == grpc.StatusCode.INVALID_ARGUMENT and words in details
    alive()


class TestOrchestrator:
    """JetStream's service."""

    @pytest.fixture
    def stub(self, channel):
        return orchestrator_pb2_grpc.OrchestratorStub(channel)

    @staticmethod
    def read(call):
        """Token ids and text of each sample."""
        responses = [response.stream_content.samples for response in call]
        assert len({len(samples) for samples in responses}) == 1
        samples = list(zip(*responses, strict=True))
        return [([t for s in own for t in s.token_ids], "".join(s.text for s in own)) for own in samples]

    def test_texts_and_tokens_give_what_generate_gives(self, stub, channel):
        sampling = pb.SamplingParams(temperature=0, max_tokens=8)
        wanted = list(inference_pb2_grpc.InferenceStub(channel).Generate(request(sampling=sampling)))
        tokens = [token for response in wanted for token in response.token_ids]
        expected = (tokens, "".join(response.text for response in wanted))
        text = orchestrator_pb2.DecodeRequest.TextContent(text="The sea")
        assert self.read(stub.Decode(orchestrator_pb2.DecodeRequest(text_content=text, max_tokens=8))) == [expected]
        ids = orchestrator_pb2.DecodeRequest.TokenContent(token_ids=list(b"The sea"))
        by_ids = orchestrator_pb2.DecodeRequest(token_content=ids, max_tokens=8, num_samples=2)
        assert self.read(stub.Decode(by_ids)) == [expected, expected]

    @pytest.mark.parametrize(
        ("fields", "word"),
        [
            ({}, "content is missing"),
            ({"token_content": {"token_ids": [264]}}, "264"),
            ({"token_content": {"token_ids": [-1]}}, "-1"),
            ({"text_content": {"text": "a"}, "max_tokens": -2}, "max_tokens is -2"),
            ({"text_content": {"text": "a"}, "num_samples": -2}, "n is -2"),
        ],
    )
    def test_bad_requests_are_refused(self, stub, alive, fields, word):
        code, details, _ = failure(stub.Decode(orchestrator_pb2.DecodeRequest(**fields)))
        assert code == grpc.StatusCode.INVALID_ARGUMENT and word in details
        alive()

    def test_it_is_live_when_it_takes_requests(self, fake_server):
        with grpc.insecure_channel(fake_server.grpc_address) as channel:
            stub = orchestrator_pb2_grpc.OrchestratorStub(channel)
            assert stub.HealthCheck(orchestrator_pb2.HealthCheckRequest()).is_live
            fake_server.engine.state = "draining"
            assert not stub.HealthCheck(orchestrator_pb2.HealthCheckRequest()).is_live


@pytest.fixture
def fake_channel(fake_server):
    with grpc.insecure_channel(fake_server.grpc_address) as channel:
        yield channel


@pytest.fixture
def fake_stub(fake_channel):
    return inference_pb2_grpc.InferenceStub(fake_channel)


def test_a_fault_before_the_engine_is_counted_and_logged_with_the_id(fake_server, fake_stub, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(fake_server.engine.tokenizer, "encode", broken)
    code, _, _ = failure(fake_stub.Generate(request(text="a", request_id="my-req")))
    assert code == grpc.StatusCode.INTERNAL and fake_server.engine.metrics.reasons == ["error"]
    said = [each.getMessage() for each in caplog.records if "unexpected" in each.getMessage()]
    assert said == ["unexpected RuntimeError while answering Generate, request 'my-req'"]


def test_a_full_queue_is_resource_exhausted_with_a_time_to_retry(fake_server, fake_stub):
    fake_server.engine.max_live = 0
    code, _, metadata = failure(fake_stub.Generate(request()))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert metadata["retry-after"] == "3" and metadata["grpc-retry-pushback-ms"] == "2500"
    assert metadata["error-code"] == "queue_full_requests"


@pytest.mark.parametrize("state", ["loading", "draining", "dead"])
def test_an_engine_that_is_not_ready_is_unavailable(fake_server, fake_channel, fake_stub, state):
    fake_server.engine.state = state
    code, _, metadata = failure(fake_stub.Generate(request()))
    assert code == grpc.StatusCode.UNAVAILABLE and int(metadata["retry-after"]) >= 1
    assert fake_server.engine.metrics.reasons == {"loading": [], "dead": ["engine_dead"]}.get(state, [state])
    failure(orchestrator_pb2_grpc.OrchestratorStub(fake_channel).Decode(orchestrator_pb2.DecodeRequest(num_samples=2)))
    assert len(fake_server.engine.metrics.reasons) == (0 if state == "loading" else 3)
    with grpc.insecure_channel(fake_server.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        until(lambda: health.Check(health_pb2.HealthCheckRequest()).status == not_serving, what="health follows")


def test_health_that_cannot_be_read_is_not_serving_until_it_can(fake_server, caplog):
    engine = fake_server.engine  # of this server alone: others of the process read and log theirs, too
    with grpc.insecure_channel(fake_server.grpc_address) as channel:
        stub, statuses = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckResponse
        watched = stub.Watch(health_pb2.HealthCheckRequest(), timeout=30)
        assert next(watched).status == statuses.SERVING
        fake_server.call(lambda: delattr(engine, "state"))
        assert next(watched).status == statuses.NOT_SERVING
        time.sleep(3 * HEALTH_PERIOD_S)
        fake_server.call(lambda: setattr(engine, "state", "ready"))
        assert next(watched).status == statuses.SERVING
        watched.cancel()
    assert [each.getMessage() for each in caplog.records if each.name == "jaxserve.server"] == [
        "the engine's health cannot be read; gRPC health is NOT_SERVING until it can"
    ]


@pytest.mark.parametrize("key", [None, "Bearer wrong"])
def test_the_key_is_needed_in_metadata(key):
    server = RunningServer(FakeEngine, HttpSettings(api_keys=(ApiKey("secret"),)))
    try:
        with grpc.insecure_channel(server.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            metadata = [("authorization", key)] if key else []
            assert failure(stub.Generate(request(), metadata=metadata))[0] == grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                stub.Abort(pb.AbortRequest(request_id="a"), metadata=metadata)
            good = [("authorization", "Bearer secret")]
            assert len(list(stub.Generate(request(), metadata=good))) == 8
    finally:
        server.stop()

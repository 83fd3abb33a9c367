"""What a client says to the scheduler: class, tenant and salt; displacement; cached tokens in usage."""

import json
import threading

import grpc
import pytest

from jaxserve.config.service_class import ServiceClass, read_service_classes
from jaxserve.core import SamplingParams, Terms
from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc
from tests.server.running import RunningServer, error_of, events_of, metric_samples, until

BODY = {"prompt": "The sea", "max_tokens": 4, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def class_server(make_tiny_engine):
    """One slot, a queue of two, a class of which one request may wait."""
    classes = (ServiceClass("bulk", max_queue_requests=1, priority=7), ServiceClass("chat", priority=-3))
    engine = make_tiny_engine(
        max_num_seqs=1, decode_buckets=(1,), max_queue_requests=2, queue_displacement=True, service_classes=classes
    )
    server = RunningServer(lambda: engine)
    yield server
    server.stop()


def test_body_headers_and_grpc_name_class_tenant_and_salt(fake_server, fake_client):
    named = {"service_class": "bulk", "tenant": "t1", "cache_salt": "s"}
    for body, headers, want in (
        (named, {}, Terms(service_class="bulk", tenant="t1", cache_salt="s")),
        ({}, {"X-Service-Class": "bulk", "X-Tenant": "t1"}, Terms(service_class="bulk", tenant="t1")),
        ({"tenant": "mine"}, {"X-Tenant": "t1"}, Terms(tenant="mine")),
    ):
        answer = fake_client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1} | body, headers=headers)
        assert answer.status_code == 200
        assert fake_server.engine.submitted[-1]["terms"] == want
    with grpc.insecure_channel(fake_server.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=1), priority=0, **named)
        list(stub.Generate(request))
    want = Terms(priority=0, service_class="bulk", tenant="t1", cache_salt="s")
    assert fake_server.engine.submitted[-1]["terms"] == want


@pytest.mark.parametrize("field", ["service_class", "tenant", "cache_salt"])
def test_long_names_are_refused(fake_client, field):
    error = error_of(fake_client.post("/v1/completions", json={"prompt": "a", field: "x" * 257}), 400)
    assert error["param"] == field and "the limit is 256" in error["message"]


def test_an_unknown_class_is_refused_naming_those_there_are(class_server):
    with class_server.client() as client:
        error = error_of(client.post("/v1/completions", json=BODY | {"service_class": "gold"}), 400)
    assert error["message"] == "service_class is 'gold'; it must be one of: bulk, chat"


def test_a_class_gives_its_requests_their_priority(class_server):
    engine = class_server.engine.engine
    engine.gate.clear()
    answers = {}

    def send(name, **fields):
        with class_server.client() as client:
            answers[name] = client.post("/v1/completions", json=BODY | {"request_id": name} | fields)

    threads = []

    def start(name, waiting, **fields):
        threads.append(threading.Thread(target=send, args=(name,), kwargs=fields))
        threads[-1].start()
        until(lambda: name in engine.scheduler.live_ids and engine.scheduler.num_waiting == waiting, what=name)

    start("running", 0)
    start("bulk1", 1, service_class="bulk")
    assert engine.scheduler.sequence("bulk1").request.priority == 7
    with class_server.client() as client:
        error = error_of(client.post("/v1/completions", json=BODY | {"service_class": "bulk"}), 429)
        assert error["code"] == "queue_full_class_requests" and "service class bulk" in error["message"]
    start("plain", 2)
    # The queue is full: of those in it bulk1 is of the lowest class.
    start("chat1", 2, service_class="chat")
    threads[1].join(10)
    error = error_of(answers["bulk1"], 429)
    assert error["code"] == "displaced" and "higher class" in error["message"]
    assert int(answers["bulk1"].headers["retry-after"]) >= 1
    engine.gate.set()
    for thread in threads:
        thread.join(20)
    assert {name: answer.status_code for name, answer in answers.items()} == {
        "running": 200,
        "bulk1": 429,
        "plain": 200,
        "chat1": 200,
    }
    with class_server.client() as client:
        assert (
            'requests_rejected_total{engine="0",model_name="tiny",reason="displaced"} 1.0'
            in client.get("/metrics").text
        )
    until(lambda: engine.clean, 2, "idle-clean")


def test_choices_that_do_not_all_fit_displace_nobody(class_server):
    engine = class_server.engine.engine
    engine.gate.clear()

    def submit(name, service_class):
        params, terms = SamplingParams(max_tokens=4), Terms(service_class=service_class)
        return class_server.engine.submit(prompt_token_ids=[1, 2], params=params, request_id=name, terms=terms)

    wanted = {"runs": "chat", "low": "bulk", "equal": "chat"}
    streams = [class_server.call(lambda item=item: submit(*item)) for item in wanted.items()]
    with class_server.client() as client:
        before = dict(metric_samples(client.get("/metrics").text))
        error = error_of(client.post("/v1/completions", json=BODY | {"n": 2, "service_class": "chat"}), 429)
        assert error["code"] == "queue_full_requests" and "2 requests wait and 2 come together" in error["message"]
        after = dict(metric_samples(client.get("/metrics").text))
    assert engine.scheduler.live_ids == list(wanted)
    rejected = 'jaxserve:requests_rejected_total{engine="0",model_name="tiny",reason="queue_full_requests"}'
    assert after[rejected] == before.get(rejected, 0) + 2
    counters = {name for name in after if name.startswith("jaxserve:") and "_total" in name}
    offered = 'jaxserve:requests_offered_total{engine="0",model_name="tiny"}'
    assert {name for name in counters if after[name] != before.get(name)} == {rejected, offered}
    class_server.call(lambda: [stream.cancel() for stream in streams])
    engine.gate.set()
    until(lambda: engine.clean, 2, "idle-clean")


def test_cached_tokens_are_in_every_usage(class_server):
    body = BODY | {"prompt": "a prompt of more than thirty-two characters", "cache_salt": "usage"}
    shared = (len(body["prompt"]) - 1) // 16 * 16
    with class_server.client() as client:
        usages = [client.post("/v1/completions", json=body).json()["usage"] for _ in range(2)]
        streamed = client.post(
            "/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
        ).text
    usages.append(events_of(streamed)[-2]["usage"])
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, shared, shared]
    with grpc.insecure_channel(class_server.grpc_address) as channel:
        sampling = pb.SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        request = pb.GenerateRequest(text=body["prompt"], sampling=sampling, cache_salt="usage")
        last = list(inference_pb2_grpc.InferenceStub(channel).Generate(request))[-1]
    assert last.usage.cached_tokens == shared


def test_pfx_3_other_salts_find_nothing_and_answers_are_the_same(class_server):
    body = BODY | {"prompt": "a prompt that several tenants of one key may have in common", "return_token_ids": True}
    found = []
    with class_server.client() as client:
        for salt in ({"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}, {}):
            answer = client.post("/v1/completions", json=body | salt).json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            found.append((cached, answer["choices"][0]["token_ids"]))
    assert [cached for cached, _ in found] == [0, (len(body["prompt"]) - 1) // 16 * 16, 0, 0]
    assert all(tokens == found[0][1] for _, tokens in found)


def test_a_file_of_classes_is_read_and_mistakes_are_named(tmp_path):
    path = tmp_path / "classes.json"
    path.write_text(json.dumps({"a": {"max_slots": 2, "itl_target_s": 0.05}, "b": {}}))
    assert read_service_classes(path) == (ServiceClass("a", max_slots=2, itl_target_s=0.05), ServiceClass("b"))
    for content, message in (
        ("[", "classes.json: Expecting value"),
        ("[]", "it must be an object of classes"),
        ('{"a": 1}', "a must be an object of settings"),
        ('{"a": {"slots": 1}}', "a has 'slots'; it may have max_slots"),
        ('{"a": {"max_slots": 0}}', "max_slots of service class a is 0; it must be an integer of at least 1"),
        ('{"a": {"deadline_s": "x"}}', "deadline_s of service class a is x; it must be a number above 0"),
        ('{"": {}}', "a service class needs a name"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match="service_classes file") as raised:
            read_service_classes(path)
        assert message in str(raised.value)

"""Real servers in processes of their own, under fault plans: an engine that dies, hangs, or fails one request."""

import contextlib
import json
import signal
import threading
import time

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.doctor import main as doctor
from jaxserve.faults import ALLOW_VARIABLE
from jaxserve.replay import main as replay
from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.server.launcher import DEATH_S, FLUSH_S
from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc
from tests.server.running import error_of, events_of, metric_samples, until

URL = "/v1/completions"
LONG = {"prompt": "The sea", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
SLOW = {"at": "engine.step", "do": "hang", "seconds": 0.1, "times": None}
"""Makes every step slow enough to act within a request."""


@pytest.fixture
def serve(start, tiny_model_dir, tmp_path, compile_cache):
    """`serve(plan, *flags)`: a server of the tiny model that follows a fault plan."""

    def begin(plan, *flags):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(plan))
        return start(
            *("jaxserve.server", f"--model={tiny_model_dir}", "--served_model_name=tiny", "--dtype=float32"),
            *("--http_port=0", "--grpc_port=0", "--max_num_seqs=8", "--num_pages=80", "--max_model_len=128"),
            *("--decode_buckets=8", "--prefill_buckets=16", "--table_width_buckets=8", "--max_num_batched_tokens=16"),
            *(f"--fault_plan={path}", f"--compile_cache={compile_cache}", *flags),
            **{ALLOW_VARIABLE: "1"},
        ).ready()

    return begin


class Clients:
    """Requests at a server, each on a thread: `streams` over HTTP that have begun, one whole answer, one gRPC call.

    Attributes:
      texts: of the streams, to their ends.
      whole: the answer; grpc_codes: status of the call, None where it ended well.
    """

    def __init__(self, server, streams=3):
        self._server = server
        self.texts, self.whole, self.grpc_codes, self.cut = [], [], [], 0
        self.began = 0
        self.threads = [threading.Thread(target=self._stream) for _ in range(streams)]
        for thread in self.threads:
            thread.start()
        # Before the others, which could take the slot of a stream.
        until(lambda: self.began == streams, what="streams have begun")
        self.threads += [threading.Thread(target=each) for each in (self._ask, self._call)]
        for thread in self.threads[streams:]:
            thread.start()
        until(lambda: self._num_live() == streams + 2 or not self._is_healthy(), what="all are there")

    def _num_live(self):
        values = dict(metric_samples(httpx.get(f"{self._server.url}/metrics").text))
        labels = '{engine="0",model_name="tiny"}'
        return sum(values[f"jaxserve:num_requests_{name}{labels}"] for name in ("running", "waiting"))

    def _is_healthy(self):
        return httpx.get(f"{self._server.url}/health").status_code == 200

    def wait(self):
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive(), "a client got no end"

    def _stream(self):
        text, seen = "", False
        try:
            with httpx.stream("POST", self._server.url + URL, json=LONG | {"stream": True}, timeout=60) as response:
                for piece in response.iter_text():
                    text += piece
                    if not seen and "data: " in text:
                        seen, self.began = True, self.began + 1
        except httpx.TransportError:
            self.cut += 1
        self.texts.append(text)

    def _ask(self):
        with contextlib.suppress(httpx.TransportError):
            self.whole.append(httpx.post(self._server.url + URL, json=LONG, timeout=60))

    def _call(self):
        sampling = pb.SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        with grpc.insecure_channel(self._server.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            try:
                list(stub.Generate(pb.GenerateRequest(text="The sea", sampling=sampling)))
                self.grpc_codes.append(None)
            except grpc.RpcError as error:
                self.grpc_codes.append(error.code())


def ended_with(text, code):
    """A stream's events are JSON, and the last one is an error of this code, with nothing behind it."""
    events = events_of(text)
    assert "[DONE]" not in events
    assert events[-1]["error"]["code"] == code, events[-1]
    return events[:-1]


def grpc_health(server):
    with grpc.insecure_channel(server.grpc_address) as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status


def replays(folder):
    """The dump in a folder, which is read by replay and doctor."""
    (path,) = folder.glob("crash-*.jsonl")
    assert replay(["replay", f"--trace={path}"]) == 0
    assert doctor(["doctor", f"--trace={path}"]) == 0
    return path


def test_ops_3_of_a_dead_engine_every_client_gets_an_error_and_the_process_ends(serve, tmp_path):
    folder = tmp_path / "dumps"
    server = serve([{"at": "engine.step", "do": "raise", "skip": 60}, SLOW], f"--crash_dump_dir={folder}")
    assert httpx.get(f"{server.url}/health").json()["state"] == "ready"
    clients = Clients(server)
    with httpx.Client(base_url=server.url) as client:
        while (health := client.get("/health")).status_code == 200:
            pass
        seen_at = time.monotonic()
        assert health.json() | {"status": "dead", "state": "dead", "error": "InjectedFault"} == health.json()
        assert client.get("/ready").status_code == 503
        assert error_of(client.post(URL, json=LONG), 503)["code"] == "engine_dead"
        assert dict(metric_samples(client.get("/metrics").text))[
            'jaxserve:engine_state{engine="0",model_name="tiny",state="dead"}'
        ]
        refused_s = time.monotonic() - seen_at
    assert refused_s < 1
    assert server.wait(DEATH_S + FLUSH_S + 5) == 1
    print(f"dead: the process had ended after {time.monotonic() - seen_at:.2f} s")
    clients.wait()
    assert len(clients.texts) == 3 and not clients.cut
    for text in clients.texts:
        ended_with(text, "engine_dead")
    assert error_of(clients.whole[0], 503)["code"] == "engine_dead"
    assert clients.grpc_codes == [grpc.StatusCode.UNAVAILABLE]
    path = replays(folder)
    died = json.loads(path.read_text().splitlines()[0])["died"]
    assert died["error"].startswith("InjectedFault") and "engine_thread.py" in died["traceback"]
    assert died["versions"]["jax"] and died["settings"]["max_num_seqs"] == 8
    assert "sea" not in path.read_text()


def test_a_dead_engine_may_leave_its_process_answering(serve):
    server = serve([{"at": "engine.step", "do": "raise", "skip": 3}], "--noexit_on_death")
    clients = Clients(server, streams=1)
    clients.wait()
    time.sleep(DEATH_S + 1)
    assert httpx.get(f"{server.url}/health").status_code == 503
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 1


def test_ops_3_a_step_that_hangs_shows_in_every_probe_and_the_engine_goes_on_when_it_is_back(serve):
    plan = [{"at": "engine.step", "do": "hang", "seconds": 5, "skip": 40}]
    server = serve(plan, "--step_timeout_s=1", "--stuck_exit_s=0")
    with httpx.Client(base_url=server.url, timeout=30) as client:
        short = {"prompt": "a", "max_tokens": 3, "temperature": 0}
        before = client.post(URL, json=short).json()["choices"][0]["text"]
        time.sleep(2)
        assert client.get("/health").status_code == 200, "an idle engine is not stuck"
        clients = Clients(server)
        until(lambda: client.get("/health").status_code == 503, what="unhealthy")
        health = client.get("/health").json()
        assert health["state"] == health["status"] == "stuck" and "made no step" in health["reason"]
        print(f"hang: 503 after {health['step_age_s']:.2f} s")
        assert 1 <= health["step_age_s"] < 1.75
        assert client.get("/ready").status_code == 503
        began = time.monotonic()
        assert error_of(client.post(URL, json=short), 503)["code"] == "engine_stuck"
        assert time.monotonic() - began < 0.5
        until(lambda: grpc_health(server) == health_pb2.HealthCheckResponse.NOT_SERVING, what="gRPC's health")
        clients.wait()
        assert client.get("/health").status_code == 503, "clients do not wait for the step"
        for text in clients.texts:
            ended_with(text, "engine_stuck")
        assert error_of(clients.whole[0], 503)["code"] == "engine_stuck"
        assert clients.grpc_codes == [grpc.StatusCode.UNAVAILABLE]
        until(lambda: client.get("/health").status_code == 200, 10, what="healthy again")
        assert client.post(URL, json=short).json()["choices"][0]["text"] == before
        until(lambda: grpc_health(server) == health_pb2.HealthCheckResponse.SERVING, what="gRPC's health")
        found = dict(metric_samples(client.get("/metrics").text))
        labels = '{engine="0",model_name="tiny"}'
        assert found[f"jaxserve:engine_stuck_total{labels}"] == found[f"jaxserve:engine_resumed_total{labels}"] == 1
        assert found[f"jaxserve:num_requests_running{labels}"] == 0
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


def test_ops_3_an_engine_that_stays_stuck_ends_its_process(serve, tmp_path):
    folder = tmp_path / "dumps"
    flags = ("--step_timeout_s=1", "--stuck_exit_s=1", f"--crash_dump_dir={folder}")
    server = serve([{"at": "engine.step", "do": "hang", "seconds": 600, "skip": 20}], *flags)
    began = time.monotonic()
    clients = Clients(server)
    assert server.wait(30) == 1
    print(f"hang: the process had ended after {time.monotonic() - began:.2f} s")
    clients.wait()
    for text in clients.texts:
        ended_with(text, "engine_stuck")
    assert "EngineStuckError" in replays(folder).read_text()


@pytest.mark.parametrize("is_stuck", [True, False])
def test_ops_3_a_signal_does_not_hide_a_step_that_hangs(serve, is_stuck):
    hang = {"at": "engine.step", "do": "hang", "seconds": 600, "skip": 20}
    server = serve([hang], "--step_timeout_s=1.5", "--stuck_exit_s=0", "--drain_delay_s=60")
    clients = Clients(server)
    if is_stuck:
        until(lambda: httpx.get(f"{server.url}/health").status_code == 503, what="stuck")
    server.process.send_signal(signal.SIGTERM)
    seen = []
    with contextlib.suppress(httpx.TransportError):
        while True:
            seen.append(httpx.get(f"{server.url}/health").json()["state"])
            time.sleep(0.02)
    assert server.wait(20) == 1
    # Draining first, unless it was stuck before; and stuck, or dead of it, from then on.
    assert set(seen) <= {"ready", "draining", "stuck", "dead"} and "stuck" in seen
    since = seen[seen.index("stuck") :]
    assert set(since) <= {"stuck", "dead"} and (not is_stuck or since == seen)
    clients.wait()
    for text in clients.texts:
        ended_with(text, "engine_stuck")
    assert error_of(clients.whole[0], 503)["code"] == "engine_stuck"
    assert clients.grpc_codes == [grpc.StatusCode.UNAVAILABLE]


@pytest.mark.parametrize("grace_s", [30, 0.3])
def test_ops_4_a_signal_lets_streams_finish_within_their_grace(serve, grace_s):
    server = serve([SLOW], f"--drain_grace_s={grace_s}")
    clients = Clients(server)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: httpx.get(f"{server.url}/ready").json()["state"] == "draining", what="draining")
    assert error_of(httpx.post(server.url + URL, json=LONG), 503)["code"] == "draining"
    clients.wait()
    assert server.wait() == 0 and not clients.cut
    if grace_s == 30:
        assert [events_of(text)[-1] for text in clients.texts] == ["[DONE]"] * 3
        assert clients.whole[0].status_code == 200 and clients.grpc_codes == [None]
    else:
        for text in clients.texts:
            ended_with(text, "draining")
        assert error_of(clients.whole[0], 503)["code"] == "draining"
        assert clients.grpc_codes == [grpc.StatusCode.UNAVAILABLE]


def test_ops_4_a_second_signal_ends_at_once(serve):
    server = serve([SLOW])
    clients = Clients(server)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: httpx.get(f"{server.url}/ready").json()["state"] == "draining", what="draining")
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(5) == 128 + signal.SIGTERM and time.monotonic() - began < 2
    clients.wait()
    assert clients.cut == 3, "a stream that is cut must not look like one that ended"


def test_a_server_that_is_killed_cuts_its_streams_and_serves_again_when_started(serve):
    server = serve([SLOW])
    clients = Clients(server)
    server.process.kill()
    began = time.monotonic()
    clients.wait()
    assert clients.cut == 3 and time.monotonic() - began < 5
    again = serve([])
    print(f"killed: serving again after {time.monotonic() - began:.2f} s")
    assert httpx.post(again.url + URL, json=LONG, timeout=30).status_code == 200


def constrained(name, **fields):
    """A request that a fault of grammars may hit by its id."""
    return LONG | {"structured_outputs": {"regex": "[a-z]{90}"}, "request_id": name, "max_tokens": 40} | fields


@pytest.fixture(scope="module")
def faults_of_requests():
    """At the third mask of "mid-..." and the first of "first-..."."""
    return [
        SLOW,
        {"at": "grammar.mask", "do": "raise", "request_id": "first-*", "times": None},
        # Each mask is passed twice then: with all, and alone.
        {"at": "grammar.mask", "do": "raise", "request_id": "mid-*", "skip": 3, "times": None},
    ]


def test_str_2_every_stream_ends_with_one_done_or_one_error(serve, faults_of_requests):
    server = serve(faults_of_requests)
    texts = {}

    def read(name, **fields):
        with httpx.stream("POST", server.url + URL, json=constrained(name, stream=True, **fields), timeout=60) as got:
            assert got.status_code == 200
            texts[name] = "".join(got.iter_text())

    threads = [threading.Thread(target=read, args=(name,)) for name in ("well", "first-1", "mid-1")]
    threads.append(threading.Thread(target=read, args=("late",), kwargs={"deadline_s": 0.4}))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    events = events_of(texts["well"])
    assert events.count("[DONE]") == 1 and events[-1] == "[DONE]"
    reasons = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]]
    assert reasons[-1] == "length" and not any(reasons[:-1])
    assert not ended_with(texts["first-1"], "request_failed"), "no token came before the fault"
    assert ended_with(texts["mid-1"], "request_failed"), "tokens came before the fault"
    ended_with(texts["late"], "deadline_exceeded")
    for name in ("first-2", "mid-2"):
        assert (
            error_of(httpx.post(server.url + URL, json=constrained(name), timeout=60), 500)["code"] == "request_failed"
        )
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_str_2_a_queue_timeout_on_an_open_stream_is_an_error_event(serve):
    server = serve([SLOW], "--max_num_seqs=4", "--decode_buckets=4")
    clients = Clients(server, streams=3)
    until(lambda: httpx.get(f"{server.url}/load").json()["num_requests_waiting"] == 1, what="a full server")
    body = LONG | {"stream": True, "deadline_s": 0.3}
    with httpx.stream("POST", server.url + URL, json=body, timeout=60) as response:
        assert response.status_code == 200, "the stream is open while its request waits"
        text = "".join(response.iter_text())
    assert not ended_with(text, "deadline_exceeded")
    clients.wait()
    assert [events_of(text)[-1] for text in clients.texts] == ["[DONE]"] * 3


def test_str_2_a_grpc_call_ends_with_one_status(serve, faults_of_requests):
    server = serve(faults_of_requests)
    sampling = pb.SamplingParams(
        temperature=0, max_tokens=40, structured_outputs=pb.StructuredOutputs(regex="[a-z]{90}")
    )
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        def call(name, **settings):
            responses = []
            request = pb.GenerateRequest(text="The sea", sampling=sampling, request_id=name)
            try:
                responses.extend(stub.Generate(request, **settings))
            except grpc.RpcError as error:
                return error.code()
            return [response.finish_reason for response in responses][-1]

        assert call("well") == pb.FINISH_REASON_LENGTH
        assert call("first-1") == call("mid-1") == grpc.StatusCode.INTERNAL
        assert call("late", timeout=0.4) == grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_full_disk_ends_the_trace_and_not_the_server(serve, tmp_path):
    trace = tmp_path / "trace.jsonl"
    server = serve([{"at": "trace.write", "do": "disk_full", "skip": 4, "times": None}], f"--trace_file={trace}")
    for _ in range(2):
        assert httpx.post(server.url + URL, json=LONG, timeout=30).status_code == 200
    assert [line for line in server.errors if "trace.jsonl ends here: [Errno 28] No space left" in line]
    found = dict(metric_samples(httpx.get(f"{server.url}/metrics").text))
    assert found['jaxserve:trace_write_errors{engine="0",model_name="tiny"}'] == 1
    assert TraceReader(trace) and replay(["replay", f"--trace={trace}"]) == 0
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


def test_a_fault_of_a_prompts_tokenising_or_a_grammars_compiling_is_its_requests_own(serve):
    plan = [{"at": "tokenizer.encode", "do": "raise", "skip": 1}, {"at": "grammar.compile", "do": "raise"}]
    server = serve(plan)
    with httpx.Client(base_url=server.url, timeout=30) as client:
        assert client.post(URL, json=LONG).status_code == 200
        assert error_of(client.post(URL, json=LONG), 500)["code"] == "internal_error"
        assert error_of(client.post(URL, json=constrained("a")), 500)["code"] == "internal_error"
        assert client.post(URL, json=constrained("a")).status_code == 200
        assert client.get("/health").status_code == 200

"""The whole process: ready line, signals, draining, failed starts."""

import contextlib
import dataclasses
import json
import re
import shlex
import signal
import socket
import threading
import time

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.bench.startup import startup_figures
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.server.console import curl_line
from jaxserve.server.dry_run import dry_run
from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc
from jaxserve.server.start_errors import start_error
from tests.server.running import error_of, events_of, until


@contextlib.contextmanager
def open_streams(server, count):
    """`count` streams that have begun; yields the list their whole texts go to."""
    texts, begun = [], set()

    def read():
        body = {"prompt": "a", "max_tokens": 60, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
            text = ""
            for piece in response.iter_text():
                text += piece
                if piece and text.count("data: ") >= 2:
                    begun.add(threading.get_ident())
            texts.append(text)

    def read_until_closed():
        # A server that is killed cuts its streams off.
        with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
            read()

    threads = [threading.Thread(target=read_until_closed) for _ in range(count)]
    for thread in threads:
        thread.start()
    until(lambda: len(begun) >= count, what="streams have begun")
    yield texts
    for thread in threads:
        thread.join(20)


def test_every_page_that_the_operator_is_told_of_is_there(start):
    server = start("tests.server.fake_main", 1, 0).ready()
    until(lambda: any("curl" in line for line in server.errors), what="the notes")
    told = [word.strip("(),") for line in server.errors if "curl" not in line for word in line.split()]
    pages = [word for word in told if word.startswith("http://") and word != server.url]
    assert f"{server.url}/openapi.json" in pages and f"{server.url}/" in pages
    for page in pages:
        assert httpx.get(page).status_code == 200, page


def test_on_sigterm_streams_finish_new_requests_get_503_and_the_exit_is_clean(start):
    server = start("tests.server.fake_main", 20, 0.02).ready()
    with open_streams(server, 3) as texts:
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 503, what="draining")
        response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert error_of(response, 503)["code"] == "draining" and "retry-after" in response.headers
    assert [events_of(text)[-1] for text in texts] == ["[DONE]"] * 3, "each stream is whole"
    assert server.wait() == 0


def test_with_a_drain_delay_requests_are_taken_while_ready_says_503(start):
    server = start("tests.server.fake_main", 20, 0, 0, 0, 1.0).ready()
    with httpx.Client(base_url=server.url) as kept:
        assert "connection" not in kept.post("/v1/completions", json={"prompt": "a"}).headers
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 503, what="leaving")
        assert httpx.get(f"{server.url}/health").status_code == 200
        # On the connection from before and on a new one: served, and told to go elsewhere for the next.
        for response in (
            kept.post("/v1/completions", json={"prompt": "a"}),
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}),
        ):
            assert response.status_code == 200 and response.headers["connection"] == "close"
    assert server.wait() == 0
    assert time.monotonic() - began >= 1.0


def test_a_client_that_keeps_its_connection_is_served_until_it_has_been_told(start):
    """Its stream outlasts the delay; the request after it, on the same connection, must not be refused."""
    server = start("tests.server.fake_main", 20, 0.05, 0, 0, 0.2).ready()
    body = {"prompt": "a", "max_tokens": 30, "ignore_eos": True}
    with httpx.Client(base_url=server.url, timeout=30) as kept:
        with kept.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            pieces = response.iter_text()
            text = next(pieces)
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            text += "".join(pieces)
        assert text.endswith("data: [DONE]\n\n") and time.monotonic() - began > 0.5, "the stream outlasts the delay"
        response = kept.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == 200 and response.headers["connection"] == "close"
    assert server.wait() == 0


def test_a_client_that_has_been_told_is_not_waited_for_before_new_requests_are_refused(start):
    server = start("tests.server.fake_main", 20, 0.05, 0, 0, 0.3).ready()
    body = {"prompt": "a", "max_tokens": 80, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=server.url, timeout=30) as kept:
        kept.get("/health")
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 503, what="leaving")
        with kept.stream("POST", "/v1/completions", json=body) as response:
            assert response.headers["connection"] == "close"
            pieces = response.iter_text()
            text = next(pieces)
            last = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
            while last.status_code == 200:
                time.sleep(0.05)
                last = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
            assert error_of(last, 503)["code"] == "draining"
            running = httpx.get(f"{server.url}/load").json()["num_requests_running"]
            assert running == 1, "new requests are refused while the stream runs"
            assert (text + "".join(pieces)).endswith("data: [DONE]\n\n")
    assert server.wait() == 0


def test_a_second_signal_in_the_delay_ends_at_once(start):
    server = start("tests.server.fake_main", 60, 0, 0, 0, 60).ready()
    server.process.send_signal(signal.SIGTERM)
    until(lambda: httpx.get(f"{server.url}/ready").status_code == 503, what="leaving")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(5) == 128 + signal.SIGTERM


def test_grpc_streams_finish_on_sigterm_and_health_tells_first(start):
    server = start("tests.server.fake_main", 20, 0.05, 0, 0, 0.5).ready()
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=40, ignore_eos=True))
        call = stub.Generate(request)
        next(call)
        server.process.send_signal(signal.SIGTERM)
        asked = health_pb2.HealthCheckRequest()
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        until(lambda: health.Check(asked).status == not_serving, what="health tells")
        # Still taken, as the delay goes on.
        short = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=1))
        assert list(stub.Generate(short))[-1].HasField("usage")
        assert list(call)[-1].HasField("usage"), "the stream that was open is whole"
    assert server.wait() == 0


def test_a_second_signal_ends_grpc_streams_at_once(start):
    server = start("tests.server.fake_main", 60, 0.5).ready()
    with grpc.insecure_channel(server.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="a"))
        next(call)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 503, what="draining")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(5) == 128 + signal.SIGTERM
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_past_the_grace_period_streams_end_with_an_error_object(start):
    server = start("tests.server.fake_main", 0.2, 0.2).ready()
    with open_streams(server, 3) as texts:
        server.process.send_signal(signal.SIGTERM)
    assert len(texts) == 3
    for text in texts:
        last = events_of(text)[-1]
        assert last != "[DONE]" and last["error"]["type"] == "service_unavailable_error"
    assert server.wait() == 0


def test_a_second_signal_ends_at_once(start):
    server = start("tests.server.fake_main", 60, 0.5).ready()
    with open_streams(server, 1):
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 503, what="draining")
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(5) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 2


def test_a_port_in_use_is_named_and_the_exit_is_not_zero(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start("tests.server.fake_main", 1, 0, port)
        assert server.wait() == 1
    assert f"127.0.0.1:{port}" in "".join(server.errors) and "--http_port" in "".join(server.errors)


def test_the_real_command_serves_drains_and_names_what_is_wrong(start, tiny_model_dir, tmp_path):
    shapes = ["--decode_buckets=2", "--prefill_buckets=16", "--table_width_buckets=8", "--max_num_batched_tokens=16"]
    common = ["jaxserve.server", "--http-port=0", "--grpc-port=0", "--max_num_seqs=2", "--num_pages=20", *shapes]
    missing = start(*common, f"--model={tmp_path}", JAXSERVE_CACHE=str(tmp_path))
    server = start(
        *common,
        f"--model={tiny_model_dir}",
        "--dtype=float32",
        "--max-model-len=128",
        "--served-model-name=tiny",
        f"--trace_file={tmp_path / 'trace.jsonl'}",
        JAXSERVE_CACHE=str(tmp_path),
    ).ready()
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "model": "tiny"}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(30) == 0
    assert len((tmp_path / "trace.jsonl").read_text().splitlines()) > 2
    shown = "".join(server.errors)
    assert "KV pool" in shown and "warm-up" in shown and f"curl {server.url}/v1/chat/completions" in shown
    assert missing.wait(60) == 1 and str(tmp_path) in missing.errors[-1]


def test_a_grpc_port_in_use_is_named_with_its_flag(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start("tests.server.fake_main", 1, 0, 0, port)
        assert server.wait() == 1
    assert f"127.0.0.1:{port}" in server.errors[-1] and "--grpc_port" in server.errors[-1]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8589934592 bytes.\nmore"),
        RuntimeError("INTERNAL: CUDA out of memory"),
    ],
)
def test_too_little_memory_names_what_to_change(error):
    text = start_error(error)
    assert "out of memory" in text and "\n" not in text
    for flag in ("memory_fraction", "num_pages", "max_num_seqs", "max_model_len", "dtype", "tensor_parallel_size"):
        assert f"--{flag}" in text


def test_another_failure_is_told_as_it_is():
    assert start_error(ValueError("max_model_len is 9")) == "the engine did not start: max_model_len is 9"


def test_the_dry_run_has_the_plan_of_the_server_or_says_why_there_is_none(capsys, tiny_model_dir, tmp_path):
    settings = dict(dtype="float32", max_num_seqs=4, max_num_batched_tokens=64, page_size=16, compile_cache="")
    config = EngineConfig(
        model=str(tiny_model_dir), num_pages=80, table_width_buckets=(8,), max_model_len=128, **settings
    )
    assert dry_run(config, "json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_pages"] == 80 and plan["max_tokens"] == 79 * 16 and plan["workspace_bytes"] > 0
    loaded = Engine(config).runner.memory_plan
    assert {key: plan[key] for key in ("weights_bytes", "kv_bytes", "state_bytes", "workspace_bytes")} == {
        key: getattr(loaded, key) for key in ("weights_bytes", "kv_bytes", "state_bytes", "workspace_bytes")
    }
    assert (plan["decode_buckets"], plan["prefill_buckets"], plan["table_width_buckets"]) == ([4], [64], [8])
    # Steps of decode alone and beside 64 prompt tokens, their samplers, slot placement.
    assert plan["num_programs"] == 2 + 2 + 1
    assert dry_run(config, "text") == 0
    text = capsys.readouterr().out
    assert "memory: KV pool: 80 pages" in text
    assert "programs: prefill tokens (prefill_buckets): 64" in text and "programs: to compile: 5" in text
    assert dry_run(dataclasses.replace(config, num_pages=10**9), "text") == 1
    assert "lower num_pages or raise memory_fraction" in capsys.readouterr().err
    assert dry_run(dataclasses.replace(config, model=str(tmp_path)), "text") == 1
    assert str(tmp_path) in capsys.readouterr().err


def test_under_json_every_line_of_the_command_is_an_object(start, tiny_model_dir, tmp_path):
    server = start(
        "jaxserve.server",
        f"--model={tiny_model_dir}",
        *("--http-port=0", "--grpc-port=0", "--max_num_seqs=2", "--num_pages=20", "--max_model_len=128"),
        *("--decode_buckets=2", "--prefill_buckets=16", "--table_width_buckets=8", "--max_num_batched_tokens=16"),
        *("--log_format=json", "--log_requests", "--stats_interval_s=0.2", "--served_model_name=tiny"),
        JAXSERVE_CACHE=str(tmp_path),
    ).ready()
    body = {"prompt": "not to be logged", "max_tokens": 5, "request_id": "one", "ignore_eos": True}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).status_code == 200
    took = startup_figures(httpx.get(f"{server.url}/metrics").text)
    assert took["weights_s"] > 0 and took["programs_s"] > 0
    assert 50 < took["weights_peak_mib"] <= took["peak_mib"]
    until(lambda: any('"logger":"jaxserve.server.stats"' in line for line in server.errors), what="a stats line")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(30) == 0
    records = [json.loads(line) for line in server.errors]
    (request,) = [record for record in records if record["logger"] == "jaxserve.server.requests"]
    assert (request["request_id"], request["output_tokens"], request["status"]) == ("one", 5, 200)
    assert any("memory: KV pool" in record["message"] for record in records)
    assert all(
        any(re.search(begin + r".* s; peak memory \d+\.\d MB", record["message"]) for record in records)
        for begin in ("weights: ", "warm-up: ", "tiny is ready after ")
    )
    assert "not to be logged" not in "".join(server.errors)


def test_the_curl_line_is_one_shell_command_with_valid_json():
    words = shlex.split(curl_line("o'model", "http://127.0.0.1:8000", False))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == "o'model"

"""LoRA adapters over HTTP and gRPC: routes, names, and their coming and going under traffic."""

import threading

import grpc
import pytest

from jaxserve.config.api_keys import ApiKey
from jaxserve.core import CheckpointError, RejectedError, Rejection
from jaxserve.runtime import COMPILES
from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc
from jaxserve.server.settings import HttpSettings
from jaxserve.testing.tiny_lora import write_tiny_lora
from tests.server.fake_engine import FakeEngine
from tests.server.running import RunningServer, error_of, until

ALLOWED = HttpSettings(allow_runtime_lora_updating=True)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODY = {"prompt": "The sea", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def load(client, name, path="/adapters/a"):
    return client.post(LOAD, json={"lora_name": name, "lora_path": str(path)})


def unload(client, name):
    return client.post(UNLOAD, json={"lora_name": name})


def ids_of(client, model, **fields):
    response = client.post("/v1/completions", json=BODY | {"model": model} | fields)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    return response.json()["choices"][0]["token_ids"]


@pytest.fixture
def fake():
    server = RunningServer(FakeEngine, ALLOWED)
    with server.client() as client:
        yield server.engine, client
    server.stop()


def test_answers_are_those_of_vllm(fake):
    client = fake[1]
    response = load(client, "sql")
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert response.headers["content-type"].startswith("text/plain")
    base, adapter = client.get("/v1/models").json()["data"]
    assert (base["id"], base["root"], base["parent"]) == ("fake", "/models/fake", None)
    assert (adapter["id"], adapter["root"], adapter["parent"]) == ("sql", "/adapters/a", "fake")
    assert client.get("/v1/models/sql").json() == adapter
    response = unload(client, "sql")
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["fake"]
    assert "'sql' cannot be found" in error_of(unload(client, "sql"), 404)["message"]
    for body in ({}, {"lora_name": "a"}, {"lora_path": "a"}, {"lora_name": "", "lora_path": "a"}):
        assert "must be provided" in error_of(client.post(LOAD, json=body), 400)["message"]
    assert "'lora_name' needs to be provided" in error_of(client.post(UNLOAD, json={}), 400)["message"]


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (CheckpointError("/a/adapter_model.safetensors is cut short"), 400),
        (ValueError("4 LoRA adapters are loaded"), 400),
        (RejectedError(Rejection("adapter_leaving", "try again later", retry_after_s=1.0)), 429),
    ],
)
def test_what_cannot_be_loaded_is_told(fake, fault, status):
    engine, client = fake
    engine.adapters.fault = fault
    response = load(client, "sql")
    assert error_of(response, status)["message"] == str(fault)
    assert ("retry-after" in response.headers) == (status == 429)


def test_routes_are_closed_unless_opened_and_need_a_key(fake_client):
    for response in (load(fake_client, "a"), unload(fake_client, "a")):
        assert "--allow_runtime_lora_updating" in error_of(response, 404)["message"]
    server = RunningServer(FakeEngine, HttpSettings(api_keys=(ApiKey("k"),), allow_runtime_lora_updating=True))
    try:
        with server.client() as client:
            error_of(load(client, "a"), 401)
            error_of(unload(client, "a"), 401)
            assert not server.engine.adapters.listed
    finally:
        server.stop()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_every_route_takes_an_adapter_as_its_model(fake, path):
    engine, client = fake
    load(client, "sql")
    text = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a"}
    fields = {"/v1/completions": "prompt", "/v1/chat/completions": "messages", "/v1/responses": "input"}
    body = {fields[path]: text[fields[path]]}
    for model, adapter in (("sql", "sql"), ("fake", ""), (None, "")):
        response = client.post(path, json=body | {"model": model})
        assert response.status_code == 200, response.text
        assert response.json()["model"] == (model or "fake") and engine.submitted[-1]["adapter"] == adapter
    error = error_of(client.post(path, json=body | {"model": "other"}), 404)
    assert error["code"] == "model_not_found" and "'fake', 'sql'" in error["message"]


def test_grpc_takes_an_adapter_as_its_model():
    server = RunningServer(FakeEngine, ALLOWED)
    try:
        with server.client() as client, grpc.insecure_channel(server.grpc_address) as channel:
            load(client, "sql")
            generate = inference_pb2_grpc.InferenceStub(channel).Generate
            sampling = pb.SamplingParams(max_tokens=2)
            list(generate(pb.GenerateRequest(text="a", model="sql", sampling=sampling)))
            assert server.engine.submitted[-1]["adapter"] == "sql"
            with pytest.raises(grpc.RpcError) as failed:
                list(generate(pb.GenerateRequest(text="a", model="other", sampling=sampling)))
            assert failed.value.code() is grpc.StatusCode.NOT_FOUND
    finally:
        server.stop()


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_model_dir):
    at = tmp_path_factory.mktemp("lora")
    for index in range(3):
        write_tiny_lora(at / str(index), tiny_model_dir, seed=index + 1)
    return at


@pytest.fixture(scope="module")
def real(make_tiny_engine, folders):
    """A server over the tiny model with two places, one of them taken at the start."""
    engine = make_tiny_engine(enable_lora=True, max_loras=2, lora_modules=(f"first={folders / '0'}",))
    server = RunningServer(lambda: engine, ALLOWED)
    yield server
    server.stop()


def test_adapters_come_and_go_under_traffic(real, folders):
    """Nothing compiles, nothing is lost, and whoever is answered is answered by the adapter it named."""
    with real.client() as client:
        compiles = COMPILES.count
        want = {"tiny": ids_of(client, "tiny"), "first": ids_of(client, "first")}
        for name, folder in (("second", "1"), ("third", "2")):
            assert load(client, name, folders / folder).status_code == 200
            want[name] = ids_of(client, name)
            assert unload(client, name).status_code == 200
        assert len(set(map(tuple, want.values()))) == 4
        wrong, answers, stop = [], dict.fromkeys(want, 0), threading.Event()

        def ask(model):
            with real.client() as own:
                while not stop.is_set():
                    response = own.post("/v1/completions", json=BODY | {"model": model})
                    if response.status_code == 200:
                        answers[model] += 1
                        if response.json()["choices"][0]["token_ids"] != want[model]:
                            wrong.append(response.json())
                    elif response.status_code != 404 or model in ("tiny", "first"):
                        wrong.append(response.text)

        threads = [threading.Thread(target=ask, args=(model,)) for model in want]
        for thread in threads:
            thread.start()
        try:
            for _ in range(4):
                for name, folder in (("second", "1"), ("third", "2")):
                    until(lambda: load(client, name, folders / folder).status_code == 200, 60, "a place")  # noqa: B023
                    before = answers[name]
                    until(lambda: answers[name] > before, 60, "an answer")  # noqa: B023
                    assert unload(client, name).status_code == 200
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not wrong and all(answers.values()), (wrong[:2], answers)
        assert COMPILES.count == compiles
    until(lambda: real.engine.engine.clean, 10, "idle-clean")
    real.engine.engine.scheduler.check_invariants()


def test_a_damaged_adapter_leaves_its_place_free(real, folders, tmp_path):
    with real.client() as client:
        broken = tmp_path / "broken"
        broken.mkdir()
        for file in (folders / "1").iterdir():
            (broken / file.name).write_bytes(file.read_bytes()[:-1])
        for _ in range(3):
            error = error_of(load(client, "broken", broken), 400)
            assert error["code"] == "lora_invalid" and "adapter_config.json" in error["message"]
        assert "holds no LoRA adapter" in error_of(load(client, "none", tmp_path / "none"), 404)["message"]
        assert load(client, "second", folders / "1").status_code == 200
        assert "has already been loaded" in error_of(load(client, "second", folders / "1"), 400)["message"]
        assert "max_loras" in error_of(load(client, "third", folders / "1"), 400)["message"]
        assert unload(client, "second").status_code == 200

"""A page that points its own name at this machine reads nothing; and who may touch what every tenant has."""

import pytest

from jaxserve.config.api_keys import ApiKey
from jaxserve.server.host_guard import answered_hosts
from jaxserve.server.settings import HttpSettings
from jaxserve.testing.tiny_lora import write_tiny_lora
from tests.server.fake_engine import FakeEngine
from tests.server.running import RunningServer, error_of


@pytest.mark.parametrize(
    ("allowed", "host", "has_keys", "names"),
    [
        ((), "127.0.0.1", False, ("localhost",)),
        ((), "::1", False, ("localhost",)),
        ((), "localhost", False, ("localhost",)),
        ((), "127.0.0.1", True, ()),
        ((), "0.0.0.0", False, ()),
        ((), "10.0.0.7", False, ()),
        (("*",), "127.0.0.1", False, ()),
        (("a.example",), "0.0.0.0", True, ("a.example", "localhost")),
    ],
)
def test_the_default_guards_a_loopback_server_without_keys(allowed, host, has_keys, names):
    assert answered_hosts(allowed, host, has_keys) == names


@pytest.fixture(scope="module")
def guarded():
    server = RunningServer(FakeEngine, HttpSettings(allowed_hosts=("a.example", "localhost"), allowed_origins=("*",)))
    with server.client() as client:
        yield client
    server.stop()


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:8000",
        "[::1]:8000",
        "localhost",
        "LOCALHOST:1",
        "x.localhost",
        "a.example.",
        "b.a.example:9",
    ],
)
def test_own_names_and_addresses_are_answered(guarded, host):
    assert guarded.get("/health", headers={"Host": host}).status_code == 200
    assert guarded.post("/v1/completions", json={"prompt": "a"}, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["attacker.example", "attacker.example:8000", "localhost.attacker.example", "xa.example"]
)
@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models", "/debug/state", "/tokenizer_info"])
def test_other_names_get_nothing(guarded, host, path):
    response = guarded.get(path, headers={"Host": host, "Origin": f"http://{host}"})
    assert error_of(response, 403)["code"] == "host_not_allowed"
    assert "access-control-allow-origin" not in response.headers


def test_other_names_post_nothing(guarded):
    body = {"prompt": "x" * 1_000_000}
    error_of(guarded.post("/v1/completions", json=body, headers={"Host": "attacker.example"}), 403)
    assert guarded.get("/health").status_code == 200


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, tiny_model_dir):
    """A root with an adapter, a link out of it and one whose file is a link, and an adapter beside the root."""
    at = tmp_path_factory.mktemp("adapters")
    write_tiny_lora(at / "root" / "good", tiny_model_dir, seed=1)
    write_tiny_lora(at / "outside", tiny_model_dir, seed=2)
    (at / "root" / "link").symlink_to(at / "outside")
    (at / "root" / "inner").symlink_to(at / "root" / "good")
    (at / "root" / "mixed").mkdir()
    (at / "root" / "mixed" / "adapter_config.json").write_bytes((at / "outside" / "adapter_config.json").read_bytes())
    (at / "root" / "mixed" / "adapter_model.safetensors").symlink_to(at / "outside" / "adapter_model.safetensors")
    (at / "rooted").symlink_to(at / "outside")
    return at


@pytest.fixture(scope="module")
def rooted(adapters):
    keys = (ApiKey("operator"), ApiKey("a-key", "alice"))
    settings = HttpSettings(
        api_keys=keys, allow_runtime_lora_updating=True, runtime_lora_root=str(adapters / "root"), profile_dir="x"
    )
    server = RunningServer(FakeEngine, settings)
    yield server
    server.stop()


def load(server, path, key="operator", name="x"):
    with server.client() as client:
        body = {"lora_name": name, "lora_path": str(path)}
        return client.post("/v1/load_lora_adapter", json=body, headers={"Authorization": f"Bearer {key}"})


def test_adapters_of_the_root_are_loaded(rooted, adapters):
    assert load(rooted, adapters / "root" / "good", name="a").status_code == 200
    assert load(rooted, adapters / "root" / "inner", name="b").status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "outside",
        "root/../outside",
        "root/link",
        "root/mixed",
        "rooted",
        "/etc",
        "/etc/passwd",
        "../../../../etc",
        "a\0b",
        "x" * 4000,
    ],
)
def test_others_are_refused_whether_there_or_not(rooted, adapters, path):
    before = len(rooted.engine.adapters.listed)
    response = load(rooted, adapters / path if "/etc" not in path else path)
    error = error_of(response, 403)
    assert error["code"] == "lora_path_outside" and str(adapters) not in error["message"]
    assert len(rooted.engine.adapters.listed) == before


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/start_profile"),
        ("POST", "/stop_profile"),
        ("GET", "/debug/state"),
        ("GET", "/debug/trace"),
    ],
)
def test_what_touches_every_tenant_needs_an_operators_key(rooted, method, path):
    with rooted.client() as client:
        body = {"json": {"lora_name": "x", "lora_path": "x"}} if method == "POST" else {}
        response = client.request(method, path, headers={"Authorization": "Bearer a-key"}, **body)
    assert error_of(response, 403)["code"] == "operator_key_needed"

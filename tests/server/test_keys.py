"""Several keys and their tenants, TLS, CORS."""

import shutil
import socket
import ssl
import subprocess
import time

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from jaxserve.config.api_keys import ApiKey
from jaxserve.server.auth import KeyRing
from jaxserve.server.errors import ApiError
from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc
from jaxserve.server.settings import HttpSettings
from jaxserve.server.tls import TlsFiles, tls_files
from tests.server.fake_engine import FakeEngine
from tests.server.running import RunningServer, error_of

KEYS = (ApiKey("operator"), ApiKey("a-key", "alice"), ApiKey("b-key", "bob"))
BODY = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def keyed_server():
    server = RunningServer(FakeEngine, HttpSettings(api_keys=KEYS))
    yield server
    server.stop()


def post(server, key, headers=(), **fields):
    with server.client() as client:
        return client.post(
            "/v1/completions", json=BODY | fields, headers={"Authorization": f"Bearer {key}"} | dict(headers)
        )


@pytest.mark.parametrize(
    ("key", "asked", "tenant"),
    [
        ("operator", "", ""),
        ("operator", "anyone", "anyone"),
        ("a-key", "", "alice"),
        ("a-key", "alice", "alice"),
        ("b-key", "", "bob"),
    ],
)
@pytest.mark.parametrize("where", ["body", "header", "grpc"])
def test_a_requests_tenant_comes_from_its_key(keyed_server, key, asked, tenant, where):
    if where == "grpc":
        with grpc.insecure_channel(keyed_server.grpc_address) as channel:
            request = pb.GenerateRequest(text="a", tenant=asked, sampling=pb.SamplingParams(max_tokens=1))
            list(inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=bearer(key)))
    elif where == "header":
        assert post(keyed_server, key, {"X-Tenant": asked}).status_code == 200
    else:
        assert post(keyed_server, key, tenant=asked).status_code == 200
    assert keyed_server.engine.submitted[-1]["terms"].tenant == tenant


def bearer(key):
    return [("authorization", f"Bearer {key}")]


def test_another_tenant_than_the_keys_is_forbidden_on_both_fronts(keyed_server):
    for fields in ({"tenant": "bob"}, {"headers": {"X-Tenant": "bob"}}):
        error = error_of(post(keyed_server, "a-key", **fields), 403)
        assert error["param"] == "tenant" and "'bob'" in error["message"] and "'alice'" in error["message"]
    with grpc.insecure_channel(keyed_server.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(text="a", tenant="bob"), metadata=bearer("a-key")
        )
        with pytest.raises(grpc.RpcError) as failed:
            list(call)
    assert failed.value.code() == grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("key", ["a-ke", "a-key2", "alice:a-key", "alice", "a-key b-key"])
def test_what_is_no_key_is_refused(keyed_server, key):
    error_of(post(keyed_server, key), 401)


@pytest.mark.parametrize("size", [30, 10_000_000])
def test_a_refusal_arrives_whole_although_its_body_comes_late(keyed_server, size):
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", keyed_server.port)) as connection:
        connection.settimeout(10)
        connection.sendall(head.encode())
        time.sleep(0.05)
        if size < 1000:
            connection.sendall(b"x" * size)  # of a long body nothing more is waited for
        answer = b""
        while b'"code":"invalid_api_key"}}' not in answer:
            piece = connection.recv(4096)
            assert piece, f"closed after {answer!r}"
            answer += piece
    assert answer.startswith(b"HTTP/1.1 401")
    assert (b"connection: close" in answer) == (size > 1000)


def test_every_key_is_compared_whichever_matches(monkeypatch):
    compared = []

    def compare(given, key):
        compared.append(key)
        return given == key

    monkeypatch.setattr("jaxserve.server.auth.hmac.compare_digest", compare)
    ring = KeyRing(KEYS)
    assert ring.tenant_of("Bearer operator") == "" and len(compared) == 3
    assert ring.tenant_of("bearer b-key") == "bob" and len(compared) == 6
    with pytest.raises(ApiError):
        ring.tenant_of("Bearer none")
    assert len(compared) == 9


def test_without_a_key_grpc_answers_health_alone(keyed_server):
    with grpc.insecure_channel(keyed_server.grpc_address) as channel:
        assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            ProtoReflectionDescriptorDatabase(channel).get_services()
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            inference_pb2_grpc.InferenceStub(channel).GetModelInfo(pb.GetModelInfoRequest())


def test_guarded_probes_need_a_key_too():
    server = RunningServer(FakeEngine, HttpSettings(api_keys=KEYS, guard_probes=True))
    try:
        with server.client() as client:
            for path in ("/health", "/ready", "/version", "/metrics"):
                error_of(client.get(path), 401)
                assert client.get(path, headers={"Authorization": "Bearer a-key"}).status_code == 200
        with grpc.insecure_channel(server.grpc_address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                stub.Check(health_pb2.HealthCheckRequest())
            assert stub.Check(health_pb2.HealthCheckRequest(), metadata=bearer("a-key")).status
    finally:
        server.stop()


def make_certificate(folder, passphrase=None):
    """A self-signed certificate of localhost and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command to make a certificate with")
    certfile, keyfile = str(folder / "cert.pem"), str(folder / "key.pem")
    secret = ["-passout", f"pass:{passphrase}"] if passphrase else ["-nodes"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2", "-subj", "/CN=localhost", *secret]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *names, "-out", certfile, "-keyout", keyfile], check=True, capture_output=True)
    return TlsFiles(certfile, keyfile)


def test_both_fronts_speak_tls_and_nothing_else(tmp_path):
    files = make_certificate(tmp_path)
    files.check()
    server = RunningServer(FakeEngine, HttpSettings(), files)
    try:
        trusted = ssl.create_default_context(cafile=files.certfile)
        with httpx.Client(base_url=server.url, verify=trusted) as client:
            assert client.post("/v1/completions", json=BODY).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{server.port}/health")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{server.url}/health")
        with open(files.certfile, "rb") as file:
            credentials = grpc.ssl_channel_credentials(file.read())
        with grpc.secure_channel(server.grpc_address, credentials) as channel:
            request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=3))
            assert len(list(inference_pb2_grpc.InferenceStub(channel).Generate(request))) == 3
        with grpc.insecure_channel(server.grpc_address) as channel, pytest.raises(grpc.RpcError):
            inference_pb2_grpc.InferenceStub(channel).GetModelInfo(pb.GetModelInfoRequest(), timeout=3)
    finally:
        server.stop()


def test_certificate_files_that_do_not_do_are_named(tmp_path):
    (tmp_path / "other").mkdir()
    files, other = make_certificate(tmp_path), make_certificate(tmp_path / "other", passphrase="secret")
    assert tls_files(None, None) is None and tls_files(files.certfile, files.keyfile) == files
    for certfile, keyfile, message in (
        (files.certfile, None, "ssl_keyfile is missing; ssl_certfile needs it"),
        (None, files.keyfile, "ssl_certfile is missing"),
        ("/no/such/file", files.keyfile, "ssl_certfile is /no/such/file: No such file"),
        (files.certfile, "/no/such/key", "ssl_keyfile is /no/such/key"),
        (files.keyfile, files.certfile, "must be a certificate and its private key"),
        (other.certfile, other.keyfile, "without a passphrase"),
    ):
        with pytest.raises(ValueError, match=message):
            tls_files(certfile, keyfile)


def test_pages_of_other_origins_are_let_in_only_when_allowed():
    page = {"Origin": "https://a.example"}
    preflight = page | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for allowed, header in (((), None), (("https://a.example",), "https://a.example"), (("*",), "*")):
        server = RunningServer(FakeEngine, HttpSettings(api_keys=KEYS, allowed_origins=allowed))
        try:
            with server.client() as client:
                asked = client.options("/v1/completions", headers=preflight)
                refused = client.post("/v1/completions", json=BODY, headers=page)
                other = client.get("/health", headers={"Origin": "https://b.example"})
        finally:
            server.stop()
        assert asked.headers.get("access-control-allow-origin") == header
        assert asked.status_code == (200 if allowed else 401)
        # A refusal can be read by the page too.
        assert error_of(refused, 401) and refused.headers.get("access-control-allow-origin") == header
        assert other.headers.get("access-control-allow-origin") == ("*" if header == "*" else None)

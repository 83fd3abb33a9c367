"""Keys, tokens and prompts of a real server are in none of its output, nor in what it shows."""

import json
import os
import subprocess
import sys
import threading

import grpc
import httpx
import pytest

from jaxserve.config.api_keys import ApiKey
from jaxserve.disaggregation.prefill_server import PrefillSettings
from jaxserve.disaggregation.remote_prefill import RemotePrefillSettings
from jaxserve.router.settings import HealthSettings
from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc
from jaxserve.server.settings import HttpSettings

OPERATOR, TENANT, TOKEN = "sk-operator-c0ffee", "sk-alice-5ec4e7", "kv-token-0ddba11"
CANARY = "canary-feed5eed"
"""In every prompt, and in what is wrong with a request."""
FLAGS = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "num_pages": 40,
    "decode_buckets": "2",
    "prefill_buckets": "64",
    "table_width_buckets": "8",
    "http_port": 0,
    "grpc_port": 0,
    "log_level": "debug",
    "stats_interval_s": 0.2,
}
ROUTES = ("/debug/state?iterations=256", "/debug/trace", "/metrics", "/load", "/v1/models", "/version", "/openapi.json")


class Server:
    """A server process, all of whose output is kept."""

    def __init__(self, folder, model, log_format):
        (folder / "keys").write_text(f"alice:{TENANT}\n")
        (folder / "token").write_text(TOKEN)
        self.flags = FLAGS | {
            "model": model,
            "api_key_file": folder / "keys",
            "kv_token_file": folder / "token",
            "disaggregation": "prefill",
            "kv_port": 0,
            "log_format": log_format,
            "trace_file": folder / "trace.jsonl",
        }
        self.process = self.start("--log_requests")
        self.lines, self.errors = [], []
        self.readers = [self.keep(self.process.stderr, self.errors)]
        ready = self.process.stdout.readline().split()
        assert ready[:2] == ["jaxserve", "ready"], "".join(self.errors)[-3000:]
        self.addresses = dict(word.split("=") for word in ready[2:])
        self.readers.append(self.keep(self.process.stdout, self.lines))

    def keep(self, stream, kept):
        reader = threading.Thread(target=lambda: kept.extend(stream), daemon=True)
        reader.start()
        return reader

    def start(self, *more):
        flags = [f"--{name}={value}" for name, value in self.flags.items()]
        return subprocess.Popen(
            [sys.executable, "-m", "jaxserve.server", *flags, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "JAXSERVE_API_KEY": OPERATOR},
        )

    def client(self, key=OPERATOR):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=f"http://{self.addresses['http']}", timeout=60, headers=headers)

    def end(self):
        """All it has written."""
        self.process.terminate()
        self.process.wait(60)
        for reader in self.readers:
            reader.join(10)
        self.process.stdout.close()
        self.process.stderr.close()
        return "".join((*self.lines, *self.errors))


def provoke(server):
    """Requests that succeed, that fail in many ways, and what the server shows of them."""
    shown = []
    with server.client() as client, server.client(TENANT) as tenant, server.client("") as nobody:
        chat = {"messages": [{"role": "user", "content": CANARY}]}
        bodies = [
            ("/v1/completions", {"prompt": CANARY, "max_tokens": 2}),
            ("/v1/chat/completions", chat | {"max_tokens": 2}),
            ("/v1/completions", {"prompt": CANARY * 1000}),
            ("/v1/completions", {"prompt": [CANARY]}),
            ("/v1/completions", {"prompt": CANARY, "max_tokens": 2, "stop": [CANARY], "bad_words": [CANARY]}),
            ("/v1/completions", {"prompt": CANARY, "structured_outputs": {"regex": CANARY + "("}}),
            ("/v1/chat/completions", chat | {"chat_template_kwargs": {"messages": CANARY}}),
            ("/v1/chat/completions", {"messages": [{"role": "tool", "content": CANARY, "tool_call_id": "c"}]}),
            ("/v1/responses", {"input": CANARY, "max_output_tokens": 2}),
            ("/tokenize", {"prompt": CANARY}),
        ]
        for path, body in bodies:
            for who in (client, tenant):
                assert who.post(path, json=body).status_code < 500
            assert nobody.post(path, json=body).status_code == 401
        for junk in (f'{{"prompt": "{CANARY}', f'["{CANARY}"]', CANARY):
            client.post("/v1/completions", content=junk, headers={"Content-Type": "application/json"})
        for key in (OPERATOR + "x", f"{OPERATOR} {TENANT}", TENANT[:-1]):
            with server.client(key) as other:
                assert other.get("/v1/models").status_code == 401
        shown += [client.get(route).text for route in ROUTES]
        shown += [tenant.get(route).text for route in ROUTES]
        shown.append(str(client.get("/v1/models").headers))
    with grpc.insecure_channel(server.addresses["grpc"]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for key in (OPERATOR, TENANT, OPERATOR + "x"):
            for text in (CANARY, CANARY * 1000):
                try:
                    list(stub.Generate(pb.GenerateRequest(text=text), metadata=[("authorization", f"Bearer {key}")]))
                except grpc.RpcError as refused:
                    shown.append(refused.details())
    return "".join(shown)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_output_of_a_server_has_a_secret_or_a_prompt(tmp_path, tiny_model_dir, log_format):
    server = Server(tmp_path, tiny_model_dir, log_format)
    try:
        shown = provoke(server)
    finally:
        written = server.end()
    assert "status=200" in written if log_format == "text" else '"status":200' in written
    written += (tmp_path / "trace.jsonl").read_text()
    for question in ("--print_config", "--dry_run"):
        asked = server.start(question)
        written += "".join(asked.communicate(timeout=120))
    for name, text in (("output", written), ("answers", shown)):
        for secret in (OPERATOR, TENANT, TOKEN):
            assert secret not in text.replace(secret + "x", ""), f"{secret} is in its {name}"
            assert json.dumps(secret)[1:-1] not in text
    assert CANARY not in written


def test_settings_do_not_show_their_secrets():
    keys = (ApiKey(OPERATOR), ApiKey(TENANT, "alice"))
    apart = (PrefillSettings(token=TOKEN), RemotePrefillSettings((), TOKEN), HealthSettings(api_key=OPERATOR))
    for settings in (HttpSettings(api_keys=keys), keys, *apart):
        for secret in (OPERATOR, TENANT, TOKEN):
            assert secret not in repr(settings) and secret not in str(settings)

"""A model whose chat template never ends: its chats fail, and everything else is answered meanwhile."""

import threading
import time

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.running import RunningServer, error_of
from tests.text.test_template_limits import BOMBS
from tests.text.vocabularies import byte_tokenizer

NAMES = ("nested loops", "doubled by plus", "a macro that calls itself twice", "a shared list as JSON", "a width")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_template_that_never_ends_fails_its_chats_alone(tmp_path, name, path):
    server = RunningServer(FakeEngine)
    server.engine.max_model_len = 1 << 20
    server.engine.tokenizer = byte_tokenizer(tmp_path).with_chat_template(BOMBS[name])
    answers, longest_s, stop = [], [0.0], threading.Event()

    def chat(content):
        with server.client() as client:
            body = {"messages": [{"role": "user", "content": content}]}
            answers.append(client.post(path, json=body, timeout=110))  # four of 5 s of processor time each

    def watch():
        with server.client() as client:
            while not stop.is_set():
                begin = time.monotonic()
                assert client.get("/health").status_code == 200
                longest_s[0] = max(longest_s[0], time.monotonic() - begin)

    try:
        threads = [threading.Thread(target=chat, args=(content,)) for content in ("a", "a" * 5000) * 2]
        watcher = threading.Thread(target=watch)
        watcher.start()
        for thread in threads:
            thread.start()
        with server.client() as client:
            body = {"prompt": "x" * 5000, "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 200
        for thread in threads:
            thread.join(120)
        stop.set()
        watcher.join(30)
        assert len(answers) == 4 and not any(thread.is_alive() for thread in threads)
        for answer in answers:
            assert "chat template reached a limit" in error_of(answer, 400)["message"]
        # Without limits it stood still for ever; the bound leaves room for a busy machine.
        assert longest_s[0] < 5.0
    finally:
        stop.set()
        server.stop()

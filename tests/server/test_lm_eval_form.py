"""The requests of lm-eval's `local-completions` (tools/clients/lm_eval), whose sums must be the engine's."""

import pytest

CONTEXT, CONTINUATION = "The capital of France is", " Paris, as always"


@pytest.fixture
def tokens_of(client):
    """As lm-eval's remote tokenizer encodes."""

    def encode(text):
        return client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]

    return encode


def test_the_remote_tokenizer_finds_what_it_asks_for(client, tokens_of):
    info = client.get("/tokenizer_info").json()
    assert tokens_of(info["eos_token"]) == [info["eos_token_id"]]
    assert tokens_of(info["bos_token"]) == [info["bos_token_id"]]
    ids = tokens_of(CONTEXT + CONTINUATION)
    assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == CONTEXT + CONTINUATION


def test_the_log_likelihood_of_a_continuation_is_that_of_prompt_logprobs(client, tokens_of):
    start, ids = len(tokens_of(CONTEXT)), tokens_of(CONTEXT + CONTINUATION)
    body = {"model": "tiny", "prompt": [ids, ids[:-1]], "temperature": 0, "seed": 1234}
    scored = client.post("/v1/completions", json=body | {"max_tokens": 1, "logprobs": 1, "echo": True}).json()
    plain = client.post("/v1/completions", json=body | {"max_tokens": 0, "prompt_logprobs": 0}).json()
    for prompt, choice, own in zip(body["prompt"], scored["choices"], plain["choices"], strict=True):
        got = choice["logprobs"]["token_logprobs"]
        want = [
            entry[str(token)]["logprob"] for entry, token in list(zip(own["prompt_logprobs"], prompt, strict=True))[1:]
        ]
        assert len(got) == len(prompt) + 1 and got[0] is None
        assert got[1:-1] == pytest.approx(want, abs=1e-4)
        assert sum(got[start:-1]) == pytest.approx(sum(want[start - 1 :]), abs=1e-3)


def test_whether_a_continuation_is_the_greedy_one_shows_in_the_first_alternatives(client, tokens_of):
    """lm-eval compares each token's score with the best of `top_logprobs`, exactly."""
    ids = tokens_of(CONTEXT)
    body = {"model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    greedy = client.post("/v1/completions", json=body | {"prompt": ids, "max_tokens": 6}).json()["choices"][0][
        "token_ids"
    ]
    ask = body | {"max_tokens": 1, "logprobs": 1, "echo": True}
    for continuation, is_greedy in ((greedy, True), ([*greedy[:-1], (greedy[-1] + 1) % 256], False)):
        choice = client.post("/v1/completions", json=ask | {"prompt": ids + continuation}).json()["choices"][0]
        scores, best = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
        pairs = list(zip(scores, best, strict=True))[len(ids) : -1]
        assert all(score == max(top.values()) for score, top in pairs) == is_greedy

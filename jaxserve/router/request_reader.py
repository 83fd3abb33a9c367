"""What of a request matters for routing: its prompt's beginnings, model, session, and how much there is to do.

A body that cannot be read here is no error here: it is routed by load, and the replica says what is wrong with it. Text
is not tokenised: equal beginnings of text are equal beginnings of tokens, up to the last token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from jaxserve.routing import NO_PROMPT, PromptKeys, RouteRequest, keys_of_text, keys_of_tokens, scope_root

KEYED_BYTES = 1 << 20
"""What lies behind so much of a prompt is not looked at: it fits hardly any model, and every stream would wait."""
BYTES_PER_TOKEN = 4
"""Of text, for the estimate of its tokens."""
_OUTPUT_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_DEFAULT_OUTPUT = 256
"""Output tokens counted of a request that does not say how many it may have."""
_MOST_OUTPUT = 1 << 20


def read_route(body: bytes, headers: Mapping[str, str], tenant: str, session_header: str) -> RouteRequest:
    """What a generation request is routed by.

    Args:
      headers: of the request.
      tenant: of its API key; "": its own word counts.
      session_header: header that names a session; "": none does.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return RouteRequest()
    if not isinstance(document, dict):
        return RouteRequest()
    model, salt = _text(document, "model"), _text(document, "cache_salt")
    tenant = tenant or _text(document, "tenant") or headers.get("x-tenant", "")
    session = headers.get(session_header, "") if session_header else ""
    session = session or _text(document, "prompt_cache_key") or salt
    prompt = _prompt_keys(scope_root(tenant, salt, model), document)
    return RouteRequest(
        prompt,
        prompt.num_bytes // BYTES_PER_TOKEN + _output_tokens(document),
        model,
        f"{len(tenant)}:{tenant}{session}" if session else "",
    )


def _text(document: dict[str, Any], field: str) -> str:
    value = document.get(field)
    return value if isinstance(value, str) else ""


def _output_tokens(document: dict[str, Any]) -> int:
    for field in _OUTPUT_FIELDS:
        value = document.get(field)
        if isinstance(value, int):
            return min(max(value, 0), _MOST_OUTPUT)
    return _DEFAULT_OUTPUT


def _prompt_keys(root: bytes, document: dict[str, Any]) -> PromptKeys:
    """Of a completion's prompt, a chat's messages or a response's input; of several prompts the first one's."""
    try:
        if "messages" in document:
            return keys_of_text(root, _conversation(document.get("tools"), document["messages"]))
        if "input" in document:
            first = [document.get("tools"), document.get("instructions")]
            return keys_of_text(root, _conversation(first, document["input"]))
    except orjson.JSONEncodeError:  # deeper than it writes, though not than it reads
        return NO_PROMPT
    prompt = document.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return keys_of_text(root, prompt[:KEYED_BYTES].encode("utf-8", "surrogatepass"))
    if isinstance(prompt, list):
        try:
            return keys_of_tokens(root, prompt[: KEYED_BYTES // BYTES_PER_TOKEN])
        except (TypeError, OverflowError):
            return NO_PROMPT
    return NO_PROMPT


def _conversation(first: Any, turns: Any) -> bytes:
    """A conversation as bytes that its continuation begins with; tools stand first, as templates have them.

    What lies behind `KEYED_BYTES` is left out.
    """
    pieces, size = [], 0
    for each in [first, *turns] if isinstance(turns, list) else [first, turns]:
        if each and size < KEYED_BYTES:
            pieces.append(orjson.dumps(each))
            size += len(pieces[-1])
    return b"\n".join(pieces)[:KEYED_BYTES]

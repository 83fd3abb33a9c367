"""Text to token ids and back: POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.answering import answer, answer_with
from jaxserve.server.description import answers, takes
from jaxserve.server.errors import ApiError
from jaxserve.server.field_checks import asks, field_error, parse_model
from jaxserve.server.json_body import JsonResponse
from jaxserve.server.messages import chat_end, normalize_messages
from jaxserve.server.schema import NO_SPECIAL_TOKENS_IN_CHAT, DetokenizeRequest, TokenizeRequest
from jaxserve.server.service import GenerationService
from jaxserve.server.tools import parse_tools

_CHAT_FIELDS: dict[str, tuple[Any, ...]] = {
    # field: values that ask for nothing
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "tools": ([],),
}


def add_token_routes(app: FastAPI, service: GenerationService, max_body_bytes: int) -> None:
    """Adds the routes."""

    async def tokenize_body(service: GenerationService, _: Request, body: dict[str, Any]) -> Response:
        spec = parse_model(TokenizeRequest, body)
        service.check_ready(spec.model)
        if (spec.prompt is None) == (spec.messages is None):
            raise ApiError("invalid", "give either prompt or messages", param="prompt")
        if spec.prompt is not None:
            _refuse_chat_fields(body)
            add_special = spec.add_special_tokens is not False
            (ids,) = await service.encode([spec.prompt], add_special, param="prompt", converts=True)
        else:
            if spec.add_special_tokens is not None:
                raise ApiError("invalid", NO_SPECIAL_TOKENS_IN_CHAT, param="add_special_tokens")
            messages = normalize_messages(spec.messages)
            end = chat_end(messages, spec.add_generation_prompt, spec.continue_final_message)
            variables = spec.chat_template_kwargs
            use = parse_tools(spec.tools, None, None)
            tools = use.tools if use else None
            ids = await service.encode_chat(messages, end, variables, tools=tools, param="messages", converts=True)
        strings = await service.token_texts(ids) if spec.return_token_strs else None
        max_model_len = service.engine.max_model_len
        content = {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": strings}
        return JsonResponse(content)

    async def detokenize_body(service: GenerationService, _: Request, body: dict[str, Any]) -> Response:
        spec = parse_model(DetokenizeRequest, body)
        service.check_ready(spec.model)
        return JsonResponse({"prompt": await service.decode(spec.tokens)})

    @app.post("/tokenize", **takes(TokenizeRequest, {"prompt": "The sea is"}), **answers("count", "tokens"))
    async def tokenize(request: Request) -> Response:
        return await answer(service, max_body_bytes, request, tokenize_body)

    @app.post("/detokenize", **takes(DetokenizeRequest, {"tokens": [1, 2, 3]}), **answers("prompt"))
    async def detokenize(request: Request) -> Response:
        return await answer(service, max_body_bytes, request, detokenize_body)

    @app.get("/tokenizer_info", **answers("tokenizer_class", "model_max_length"))
    async def tokenizer_info(_: Request) -> Response:
        return answer_with(lambda: _tokenizer_info(service))


def _refuse_chat_fields(body: dict[str, Any]) -> None:
    for name, harmless in _CHAT_FIELDS.items():
        if asks(body.get(name), harmless):
            raise field_error(name, f"{name} goes with messages; leave it out with prompt")


def _tokenizer_info(service: GenerationService) -> dict[str, Any]:
    """The tokenizer in the names of a Hugging Face `tokenizer_config.json`, as far as clients use them."""
    service.check_ready()
    tokenizer = service.engine.tokenizer
    eos_id = tokenizer.eos_ids[0] if tokenizer.eos_ids else None

    def text(token_id: int | None) -> str | None:
        return None if token_id is None else tokenizer.token_text(token_id)

    return {
        "tokenizer_class": type(tokenizer).__name__,
        "model_max_length": service.engine.max_model_len,
        "vocab_size": tokenizer.vocab_size,
        "bos_token": text(tokenizer.bos_id),
        "bos_token_id": tokenizer.bos_id,
        "eos_token": text(eos_id),
        "eos_token_id": eos_id,
        "eos_token_ids": list(tokenizer.eos_ids),
        # Nothing is ever padded here; clients that pad take EOS, as Hugging Face's users do.
        "pad_token": text(eos_id),
        "special_tokens": {str(token_id): text(token_id) for token_id in sorted(tokenizer.special_ids)},
        "chat_template": tokenizer.chat_template,
    }

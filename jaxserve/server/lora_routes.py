"""Loading and unloading of LoRA adapters: POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jaxserve.core import CheckpointError, UnsupportedModelError
from jaxserve.server.answering import answer
from jaxserve.server.auth import check_operator
from jaxserve.server.description import takes
from jaxserve.server.errors import ApiError
from jaxserve.server.field_checks import parse_model
from jaxserve.server.service import GenerationService
from jaxserve.server.settings import HttpSettings

MAX_PATH_CHARS = 4096
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_TEXT: dict[int | str, dict[str, Any]] = {
    200: {"description": "Success", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


class LoadLoraRequest(BaseModel):
    """POST /v1/load_lora_adapter."""

    model_config = ConfigDict(strict=True)
    lora_name: str | None = None
    lora_path: str | None = None


class UnloadLoraRequest(BaseModel):
    """POST /v1/unload_lora_adapter."""

    model_config = ConfigDict(strict=True)
    lora_name: str | None = None


def add_lora_routes(app: FastAPI, service: GenerationService, settings: HttpSettings) -> None:
    """Adds the routes; they answer 404 unless adapters may be loaded at run time."""
    engine, limit = service.engine, settings.max_body_bytes

    def check_allowed(request: Request) -> None:
        check_operator(request.scope, "adapters are there for every tenant")
        if not settings.allow_runtime_lora_updating:
            message = "LoRA adapters are not loaded at run time; start the server with --allow_runtime_lora_updating"
            raise ApiError("not_found", message, code="lora_updating_off")

    async def load(service: GenerationService, request: Request, body: dict[str, Any]) -> Response:
        check_allowed(request)
        spec = parse_model(LoadLoraRequest, body)
        if not spec.lora_name or not spec.lora_path:
            raise ApiError("invalid", "Both 'lora_name' and 'lora_path' must be provided.", code="lora_name_missing")
        if len(spec.lora_path) > MAX_PATH_CHARS:
            message = f"lora_path has {len(spec.lora_path)} characters; the limit is {MAX_PATH_CHARS}"
            raise ApiError("invalid", message, param="lora_path")
        try:
            if settings.runtime_lora_root:
                await asyncio.to_thread(_check_inside, settings.runtime_lora_root, spec.lora_path)
            await asyncio.to_thread(engine.adapters.load, spec.lora_name, spec.lora_path)
        except (CheckpointError, UnsupportedModelError) as error:
            raise ApiError("invalid", str(error), param="lora_path", code="lora_invalid") from None
        return PlainTextResponse(f"Success: LoRA adapter '{spec.lora_name}' added successfully.")

    async def unload(service: GenerationService, request: Request, body: dict[str, Any]) -> Response:
        check_allowed(request)
        spec = parse_model(UnloadLoraRequest, body)
        if not spec.lora_name:
            raise ApiError("invalid", "'lora_name' needs to be provided.", code="lora_name_missing")
        engine.adapters.unload(spec.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{spec.lora_name}' removed successfully.")

    example = {"lora_name": "sql", "lora_path": "/adapters/sql"}

    @app.post("/v1/load_lora_adapter", responses=_TEXT, **takes(LoadLoraRequest, example, ["lora_name", "lora_path"]))
    async def load_lora_adapter(request: Request) -> Response:
        return await answer(service, limit, request, load)

    @app.post(
        "/v1/unload_lora_adapter", responses=_TEXT, **takes(UnloadLoraRequest, {"lora_name": "sql"}, ["lora_name"])
    )
    async def unload_lora_adapter(request: Request) -> Response:
        return await answer(service, limit, request, unload)


def _check_inside(root: str, path: str) -> None:
    """Raises ApiError 403 unless an adapter's folder and files lie below `root`, wherever links lead."""
    try:
        allowed = Path(root).resolve(strict=True)
        folder = Path(path)
        places = [place.resolve() for place in (folder, *(folder / name for name in ADAPTER_FILES))]
        inside = all(place.is_relative_to(allowed) for place in places)
    except (OSError, ValueError, RuntimeError):  # a part is too long or no folder, a zero byte, links in a circle
        inside = False
    if not inside:
        message = "lora_path is outside of the folder for adapters (runtime_lora_root)"
        raise ApiError("forbidden", message, param="lora_path", code="lora_path_outside")

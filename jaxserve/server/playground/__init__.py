"""The playground: one page at `/` that chats with the model and shows the engine at work.

Its parts lie beside this file and are put together once, when the server starts, into one document that loads nothing
else. The content security policy admits exactly these two scripts and this style sheet, by their hashes, and requests
to this server alone: text of a model that came out as markup would still not run.

The page holds no data and needs no key; what it asks of the server does, as from any client.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

PATH = "/"
_SCRIPTS = ("chat", "live")


def add_playground(app: FastAPI) -> None:
    """Adds `/`."""

    @app.get(PATH, include_in_schema=False)
    async def playground(_: Request) -> Response:
        page, policy = page_and_policy()
        headers = {
            "Content-Security-Policy": policy,
            "Cache-Control": "no-cache",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)


@cache
def page_and_policy() -> tuple[str, str]:
    """The document, and the Content-Security-Policy that fits it."""
    style = _read("style.css")
    scripts = {name: _read(f"{name}.js") for name in _SCRIPTS}
    page = _read("page.html")
    for name, text in {"style": style, **scripts}.items():
        page = page.replace(f"{{{{{name}}}}}", text)
    script_hashes = " ".join(map(_hash, scripts.values()))
    policy = (
        f"default-src 'none'; script-src {script_hashes}; style-src {_hash(style)}; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy


def _read(name: str) -> str:
    return (files(__name__) / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

"""Which web pages may read answers (CORS)."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware


def add_cors(app: Starlette, allowed_origins: Sequence[str]) -> None:
    """Lets pages of these origins, or of all ("*"), read answers; add it last.

    Outermost: a browser's preflight request has no key, and a refusal must be readable too.
    """
    app.add_middleware(
        CORSMiddleware,
        allow_origins=allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("X-Request-Id", "Retry-After"),
    )

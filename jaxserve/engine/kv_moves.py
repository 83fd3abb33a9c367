"""Requests whose K/V comes from another engine, or goes to one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxserve.core import Request, Submission
from jaxserve.runtime.page_transfers import PageSource


def with_kv(requests: Sequence[Request], submission: Submission) -> list[Request]:
    """The requests of a submission, with its K/V: pages to import for all of them, or where to export pages to."""
    kv = submission.kv
    if isinstance(kv, PageSource):
        kv.use([request.request_id for request in requests])
        num_imported, exports = kv.num_tokens, False
    else:
        num_imported, exports = 0, kv is not None
    if kv is None and submission.received_at is None:
        return list(requests)
    return [
        replace(
            request,
            num_imported_tokens=num_imported,
            exports_kv=exports,
            kv=kv,
            received_at=submission.received_at,
        )
        for request in requests
    ]


def forget_kv(request: Request) -> None:
    """A request has ended: it needs its imported pages no more."""
    if isinstance(request.kv, PageSource):
        request.kv.done(request.request_id)

"""PrefixCache: which page holds the K and V of which beginning of a prompt.

A full page's content depends on its tokens and on all before them, so its name is a hash over its tokens
and the name of the page before: equal names, equal K and V. The chain starts from the tenant, the
request's salt and its LoRA adapter; who does not share all three cannot find, nor time, another's pages.

A page is entered once its K and V are written, or when it is given back before that, as no layer of the model sees
its tokens any more: who finds it runs after the step that writes it. It leaves when it is evicted. Of two pages of
the same name the first is kept in the index.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jaxserve.core import Request

_DIGEST_BYTES = 16


def root_of(request: Request) -> bytes:
    """What the chain of a request's pages starts from."""
    scope = f"{len(request.tenant)}:{request.tenant}{request.cache_salt}"
    adapter = str(request.adapter).encode() if request.adapter else b""
    # A key, so that no tenant or salt can be spelled to look like another's adapter.
    return hashlib.blake2b(scope.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES, key=adapter).digest()


def page_name(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a full page.

    Args:
      parent: of the page before, or the root.
      token_ids: its tokens.
    """
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()


class PrefixCache:
    """An index of pages by name, and the order in which those without an owner are evicted.

    Attributes:
      name_of: of each page that has an entry; treat it as read-only.
    """

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self.name_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # without owner, let go longest ago first

    @property
    def num_idle(self) -> int:
        """Pages without an owner."""
        return len(self._idle)

    def enter(self, name: bytes, page: int) -> None:
        """An owned page's content is written; ignored when the name, or the page, has an entry."""
        if name not in self._page_of and page not in self.name_of:
            self._page_of[name] = page
            self.name_of[page] = name

    def find(self, names: Iterable[bytes]) -> list[int]:
        """Pages of the longest run of `names` that is there."""
        pages = []
        for name in names:
            page = self._page_of.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def find_last(self, names: Sequence[bytes], count: int) -> tuple[int, list[int]]:
        """Where all that is seen after the first of `names` are the `count` before: the longest beginning that will do.

        Returns:
          Number of the first page, and the pages: the last `count` of the beginning, or all of a shorter one.
        """
        end = len(names)
        for index in range(len(names), 0, -1):
            if end - index == count:
                return index, [self._page_of[name] for name in names[index:end]]
            if names[index - 1] not in self._page_of:
                end = index - 1
        return 0, [self._page_of[name] for name in names[:end]]

    def retire(self, page: int) -> None:
        """A page that has an entry lost its last owner; it is kept."""
        self._idle[page] = None

    def revive(self, page: int) -> None:
        """An idle page has an owner again."""
        del self._idle[page]

    def evict(self) -> int:
        """Takes the page that was let go longest ago."""
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self.name_of.pop(page)]
        return page

    def is_idle(self, page: int) -> bool:
        """It is kept and has no owner."""
        return page in self._idle

    def clear(self) -> list[int]:
        """Forgets everything; returns the idle pages, which are free now."""
        pages = list(self._idle)
        self._page_of, self.name_of, self._idle = {}, {}, OrderedDict()
        return pages

"""PrefixCache: which page holds the K and V of which beginning of a prompt.

A full page's content depends on its tokens and on all before them, so its name is a hash over its tokens
and the name of the page before: equal names, equal K and V. The chain starts from the tenant, the
request's salt and its LoRA adapter; who does not share all three cannot find, nor time, another's pages.

A page is entered once its K and V are written, or when it is given back before that, as no layer of its group sees
its tokens any more: who finds it runs after the step that writes it. It leaves when it is evicted. Of two pages of
the same name the first is kept in the index.

Layers may lie in groups with pages of their own: a page is then known by its name and its group. Of a beginning the
groups without a window need all pages, the others those that the next token sees.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

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


def entry_key(name: bytes, group: int) -> bytes:
    """What a page is entered under: its name, and its group of layers behind it."""
    return name + bytes((group,)) if group else name


def name_of_key(key: bytes) -> bytes:
    """The name in an `entry_key`."""
    return key[:_DIGEST_BYTES]


class Found(NamedTuple):
    """Pages of one group that belong to a request's beginning.

    Attributes:
      first: number of the first; those before it are neither seen nor held.
      pages: the page ids, in token order.
    """

    first: int
    pages: Sequence[int]


class PrefixCache:
    """An index of pages by name and group, and the order in which those without an owner are evicted.

    Attributes:
      name_of: of each page that has an entry its `entry_key`; treat it as read-only.
    """

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self.name_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # without owner, let go longest ago first

    @property
    def num_idle(self) -> int:
        """Pages without an owner."""
        return len(self._idle)

    @property
    def names(self) -> list[bytes]:
        """Of the pages that have an entry; with several groups a name may come several times."""
        return [name_of_key(key) for key in self._page_of]

    def enter(self, name: bytes, page: int, group: int = 0) -> None:
        """An owned page's content is written; ignored when the name in its group, or the page, has an entry."""
        key = entry_key(name, group) if group else name
        if key not in self._page_of and page not in self.name_of:
            self._page_of[key] = page
            self.name_of[page] = key

    def find(self, names: Iterable[bytes], group: int = 0) -> list[int]:
        """Pages of the longest run of `names` that is there."""
        pages = []
        for name in names:
            page = self._page_of.get(entry_key(name, group) if group else name)
            if page is None:
                break
            pages.append(page)
        return pages

    def find_beginning(self, names: Sequence[bytes], counts: Sequence[int | None]) -> list[Found]:
        """The longest beginning of which every group has what is seen after it.

        Args:
          names: of the pages, from the first.
          counts: by group, how many pages before its end a token sees; None: all.

        Returns:
          By group, the pages that are seen: the last `counts[group]` of the beginning, or all of a shorter one.
        """
        runs: dict[int, list[int]] = {}
        for group, count in enumerate(counts):
            if count is None:
                runs[group] = self.find(names, group)
                names = names[: len(runs[group])]
        last = [(group, count) for group, count in enumerate(counts) if count is not None]
        end = self._last_end(names, last) if last else len(names)
        found = {group: Found(0, run[:end]) for group, run in runs.items()}
        for group, count in last:
            first = max(end - count, 0)
            found[group] = Found(first, [self._page_of[entry_key(name, group)] for name in names[first:end]])
        return [found[group] for group in range(len(counts))]

    def _last_end(self, names: Sequence[bytes], counts: Sequence[tuple[int, int]]) -> int:
        """Length of the longest beginning of which each group has the last pages, as many as its count."""
        end, most = len(names), max([count for _, count in counts])
        for index in range(len(names), 0, -1):
            if end - index >= most:
                break
            name = names[index - 1]
            for group, count in counts:
                if end - index < count and entry_key(name, group) not in self._page_of:
                    end = index - 1
                    break
        return end

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

    def remove(self, names: Iterable[bytes], num_groups: int) -> list[int]:
        """Forgets these names in every group; returns those of their pages that were idle, which are free now."""
        idle = []
        for name in names:
            for group in range(num_groups):
                page = self._page_of.pop(entry_key(name, group), None)
                if page is None:
                    continue
                del self.name_of[page]
                if page in self._idle:
                    del self._idle[page]
                    idle.append(page)
        return idle

    def is_idle(self, page: int) -> bool:
        """It is kept and has no owner."""
        return page in self._idle

    def clear(self) -> list[int]:
        """Forgets everything; returns the idle pages, which are free now."""
        pages = list(self._idle)
        self._page_of, self.name_of, self._idle = {}, {}, OrderedDict()
        return pages

"""RequestFile: the input, read as a stream, twice: once to know what is in it, once to work on it.

The first reading, a survey, finds mistakes and counts lines before a model is loaded. It keeps every custom_id while
it lasts; the second reading keeps nothing but the line at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxserve.batch.records import RequestLine, duplicate, parse_request, too_long
from jaxserve.batch.result_file import Done

_BOM = b"\xef\xbb\xbf"
_SKIP_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Survey:
    """What the input holds.

    Attributes:
      num_lines: lines that are not blank.
      num_done: of these, lines whose result is in the output.
      duplicates: numbers of the lines whose custom_id an earlier line has.
      unknown_ids: custom_ids of the output that the input does not have.
    """

    num_lines: int
    num_done: int
    duplicates: frozenset[int]
    unknown_ids: frozenset[str]


class RequestFile:
    """The input file.

    Args:
      path: a regular file.
      max_line_bytes: a longer line is an error line; no more of it is held.

    Raises:
      ValueError: there is no such file.
    """

    def __init__(self, path: str | Path, max_line_bytes: int) -> None:
        self.path = Path(path)
        self._limit = max_line_bytes
        if not self.path.exists():
            raise ValueError(f"--input: there is no file {self.path}")
        if not self.path.is_file():
            raise ValueError(f"--input: {self.path} must be a regular file: it is read twice")

    def survey(self, done: Done) -> Survey:
        """Reads the whole file.

        Args:
          done: what the output holds.

        Raises:
          OSError: it cannot be read.
        """
        seen: set[str] = set()
        duplicates: set[int] = set()
        num_lines = num_done = 0
        for line in self._parsed():
            num_lines += 1
            if line.custom_id is not None and line.custom_id in seen:
                duplicates.add(line.number)
                line = duplicate(line)
            elif line.custom_id is not None:
                seen.add(line.custom_id)
            num_done += done.has(line)
        return Survey(num_lines, num_done, frozenset(duplicates), frozenset(done.custom_ids - seen))

    def pending(self, survey: Survey, done: Done) -> Iterator[RequestLine]:
        """The lines without a result, in order, as they are read.

        Raises:
          OSError: the file cannot be read any more.
        """
        for line in self._parsed():
            if line.number in survey.duplicates:
                line = duplicate(line)
            if not done.has(line):
                yield line

    def _parsed(self) -> Iterator[RequestLine]:
        for number, text in self._lines():
            if text is None:
                yield too_long(number, self._limit)
            elif not text.isspace():
                yield parse_request(number, text)

    def _lines(self) -> Iterator[tuple[int, bytes | None]]:
        """Numbers and texts; None for the text of a line over the limit."""
        number = 0
        with self.path.open("rb") as file:
            while text := file.readline(self._limit + 1):
                number += 1
                if number == 1:
                    text = text.removeprefix(_BOM) or b"\n"
                if len(text) <= self._limit or text.endswith(b"\n"):
                    yield number, text
                    continue
                while (rest := file.readline(_SKIP_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield number, None

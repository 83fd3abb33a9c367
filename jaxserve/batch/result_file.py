"""ResultFile: the output, appended to line by line, valid after every kill.

A line is handed to the operating system whole and at once, so a killed process leaves whole lines and at most the
beginning of one more. A rerun cuts that beginning off and goes on behind the last whole line. A write that fails, as
on a full disk, takes back what it has written of its line. The disk itself is told to keep the lines (fsync) every
`SYNC_PERIOD_S` and at the end: a power cut loses what came after, and a rerun does that again.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from jaxserve.batch.records import ID_PREFIX, RequestLine, Result, parse_result
from jaxserve.core import write_whole
from jaxserve.faults import failpoint

SYNC_PERIOD_S = 10.0
_BEGINNING = f'{{"id":"{ID_PREFIX}'.encode()


class ResultFileError(Exception):
    """The output can no longer be written; what it holds is whole lines."""


@dataclass(slots=True)
class Done:
    """What an output file holds: the lines of the input that need no more work.

    Attributes:
      custom_ids: with a result.
      numbers: lines of the input without a custom_id of their own that have been reported.
      num_failed: results with an error.
      num_bytes_cut: of an unfinished last line that was cut off.
    """

    custom_ids: set[str] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)
    num_failed: int = 0
    num_bytes_cut: int = 0

    def add(self, result: Result) -> None:
        """Counts one result."""
        if result.answers_id and result.custom_id is not None:
            self.custom_ids.add(result.custom_id)
        elif result.number is not None:
            self.numbers.add(result.number)
        self.num_failed += result.error is not None

    def has(self, line: RequestLine) -> bool:
        """Whether a line of the input has its result."""
        own = Result(line.number, line.custom_id, None, line.error)
        return line.custom_id in self.custom_ids if own.answers_id else line.number in self.numbers


class ResultFile:
    """The output file, for one process at a time.

    Args:
      path: made when missing.
      clock: seconds, monotonic.

    Raises:
      ValueError: it cannot be written, is no regular file, or another process writes it.
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = Path(path)
        self._clock = clock
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise ValueError(f"--output: {self.path} cannot be written: {os.strerror(error.errno or 0)}") from None
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise ValueError(f"--output: {self.path} must be a regular file: a rerun reads it")
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise ValueError(f"--output: another process is writing {self.path}; wait for its end") from None
        except ValueError:
            os.close(self._fd)
            raise
        self._size = os.fstat(self._fd).st_size
        self._synced_at = clock()

    def recover(self) -> Done:
        """Reads what earlier runs have written, and repairs the end.

        Raises:
          ValueError: a line is no result; nothing has been changed then.
        """
        done = Done()
        number = whole = 0
        tail = b""
        with self.path.open("rb") as file:
            for text in file:
                number += 1
                if not text.endswith(b"\n"):
                    tail = text
                    break
                done.add(self._parse(number, text))
                whole += len(text)
        if tail:
            self._mend(number, tail, whole, done)
        return done

    def append(self, line: bytes) -> None:
        """Adds one line, which ends with a newline.

        Raises:
          ResultFileError: it is not there; neither is a part of it.
        """
        try:
            failpoint("batch.write")
            self._size = write_whole(self._fd, line, self._size)
            if self._clock() - self._synced_at >= SYNC_PERIOD_S:
                self._sync()
        except Exception as error:
            reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise ResultFileError(f"{self.path}: {reason}") from error

    def close(self) -> None:
        """Makes sure of what is written, and closes the file; harmless when it is closed.

        Raises:
          ResultFileError: the disk did not take it.
        """
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            os.fsync(fd)
        except OSError as error:
            raise ResultFileError(f"{self.path}: {os.strerror(error.errno or 0)}") from error
        finally:
            os.close(fd)

    def _sync(self) -> None:
        os.fsync(self._fd)
        self._synced_at = self._clock()

    def _parse(self, number: int, text: bytes) -> Result:
        try:
            return parse_result(text)
        except ValueError:  # its text may quote the line
            message = f"--output: line {number} of {self.path} is no line of batch results"
            raise ValueError(f"{message}; give another file, or repair it") from None

    def _mend(self, number: int, tail: bytes, whole: int, done: Done) -> None:
        """Completes a last line that lacks its newline only, and cuts off one that lacks more.

        What cannot be the beginning of a result is somebody else's and is left alone.
        """
        written = tail.rstrip(b"\0")  # a file system may fill up with zeros after a power cut
        try:
            result = parse_result(written)
        except ValueError:
            if not written.startswith(_BEGINNING) and not _BEGINNING.startswith(written):
                self._parse(number, tail)
            os.ftruncate(self._fd, whole)
            self._size = whole
            done.num_bytes_cut = len(tail)
            return
        os.ftruncate(self._fd, whole + len(written))
        self._size = whole + len(written)
        self.append(b"\n")
        done.add(result)

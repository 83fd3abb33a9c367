"""BatchJob: an input and an output, checked together before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxserve.batch.records import RequestLine
from jaxserve.batch.request_file import RequestFile
from jaxserve.batch.result_file import ResultFile
from jaxserve.batch.tally import Tally
from jaxserve.config.tool_parsers import AUTO_TOOL_CALL_PARSER


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """What a batch job can be told besides the engine's settings.

    Attributes:
      input, output: files.
      in_order: results are written in the input's order, not as they come.
      window: most lines read and not yet written.
      max_line_bytes: of the input.
      allow_changed_input: go on though the output has custom_ids that the input lacks.
      fail_on_error: a line with an error makes the exit status non-zero.
      drain_grace_s: seconds that lines in progress get after the first signal.
      tool_call_parser: name of the parser of tool calls, or "auto".
    """

    input: str
    output: str
    in_order: bool = False
    window: int = 32
    max_line_bytes: int = 8 << 20
    allow_changed_input: bool = False
    fail_on_error: bool = False
    drain_grace_s: float = 30.0
    tool_call_parser: str = AUTO_TOOL_CALL_PARSER


class BatchJob:
    """The files of a job, and what is left to do.

    Raises:
      ValueError: a file is missing or not fit, or the input does not belong to the output.
      OSError: one cannot be read.

    Attributes:
      settings: as given.
      results: the output, open.
      tally: with the lines of earlier runs counted.
      notes: what an operator should know of the files.
    """

    def __init__(self, settings: BatchSettings) -> None:
        self.settings = settings
        self._requests = RequestFile(settings.input, settings.max_line_bytes)
        if _same_file(settings.input, settings.output):
            raise ValueError(f"--output: {settings.output} is the input; write to another file")
        self.results = ResultFile(settings.output)
        try:
            self._done = self.results.recover()
            self._survey = self._requests.survey(self._done)
            if self._survey.unknown_ids and not settings.allow_changed_input:
                raise ValueError(f"{self._changed()}; write to another file, or continue with --allow_changed_input")
        except BaseException:
            self.results.close()
            raise
        num_earlier = self._survey.num_done
        self.tally = Tally(self._survey.num_lines, num_earlier, num_earlier_failed=self._done.num_failed)
        self.notes = list(self._noted())

    def pending(self) -> Iterator[RequestLine]:
        """The lines without a result, in the input's order."""
        return self._requests.pending(self._survey, self._done)

    def _noted(self) -> Iterator[str]:
        if self._done.num_bytes_cut:
            yield f"{self.results.path}: cut off an unfinished last line ({self._done.num_bytes_cut} bytes)"
        if self._survey.unknown_ids:
            yield f"{self._changed()}; they stay there"
        if self.tally.num_earlier:
            yield f"{self.results.path}: going on behind {self.tally.num_earlier} of {self.tally.num_lines} lines"

    def _changed(self) -> str:
        unknown = self._survey.unknown_ids
        return (
            f"--input: {self._requests.path} has changed, or is not the input of {self.results.path}: it lacks"
            f" {len(unknown)} custom_id{'s' * (len(unknown) > 1)} of the output, as {min(unknown)[:60]!r}"
        )


def _same_file(first: str, second: str) -> bool:
    return Path(second).exists() and Path(first).samefile(second)

"""`tools/field_figures --output=F`: the scheduling field's well-known figures, by the serving scheduler.

Every figure is the outcome of runs of `jaxserve.scheduler.Scheduler` under the simulator; the schemes that are
compared are its own settings (`batching`, `prefill_chunk`, `max_queue_requests`). `docs/figures.md` has the table,
and what others published.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from jaxserve.config.command import run_command
from jaxserve.config.flags import exit_with, parse_flags
from jaxserve.sim.batching_figures import length_variance, long_among_short, mixed_lengths, offline_batches
from jaxserve.sim.figure import Figure, markdown_table
from jaxserve.sim.long_prompt_figures import long_prompt
from jaxserve.sim.overload_figures import overload

TOPICS = (long_among_short, mixed_lengths, overload, long_prompt, length_variance, offline_batches)


def field_figures() -> list[Figure]:
    """All of them, computed now."""
    return [figure for topic in TOPICS for figure in topic()]


def main(argv: Sequence[str]) -> None:
    """Prints the table, in Markdown, and writes the file.

    Raises:
      SystemExit: non-zero on a bad flag, or an output file that cannot be written.
    """
    flags = parse_flags("field_figures", argv)
    found = field_figures()
    print(markdown_table(found))
    if flags.output:
        document = {"figures": [figure.as_json() for figure in found]}
        try:
            Path(flags.output).write_text(json.dumps(document, indent=1) + "\n")
        except OSError as error:
            exit_with(f"--output: {flags.output} cannot be written: {error.strerror}")


if __name__ == "__main__":
    run_command(main)

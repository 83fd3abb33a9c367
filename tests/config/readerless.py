"""Runs Python with a stdout that nobody reads any more, as before `head` that has seen enough."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_for_nobody(*words: str, buffered: bool = True) -> tuple[int, str]:
    """Exit status and stderr of `python WORDS`; what it prints fails at the end, or at once without a buffer."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({} if buffered else {"PYTHONUNBUFFERED": "1"})
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, *words], stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr

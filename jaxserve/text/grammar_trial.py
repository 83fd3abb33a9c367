"""A program of its own that compiles a grammar and walks through it, to see that this ends.

llguidance bounds most of what a grammar may cost, not all: thousands of rules that call each other overflow the stack,
which ends the process, and a long expression takes time that grows with its square. So large grammars are tried here,
where both hurt nobody. It reads the grammar from stdin and exits 0 with an error message, or nothing, on stdout.

Run by path: it imports nothing but the standard library and llguidance.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

MEMORY_BYTES = 4 << 30
WALK_STEPS = 64
COMPILE_STACK_BYTES, WALK_STACK_BYTES = 4 << 20, 1 << 20
"""Half of what a thread that compiles has, and one that computes masks."""


def trial_limits() -> Any:
    """Bounds on what one grammar may cost; about 7 ms of lexing and 3 ms of parsing per token at most."""
    from llguidance import LLParserLimits

    return LLParserLimits(step_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False)


def main() -> None:
    """Compiles the grammar on stdin for an alphabet of bytes, and takes `WALK_STEPS` steps."""
    from llguidance import LLMatcher, LLTokenizer

    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    source, alphabet = sys.stdin.read(), LLTokenizer("byte")
    made: list[Any] = []
    _run(
        COMPILE_STACK_BYTES,
        lambda: made.append(LLMatcher(alphabet, source, log_level=0, limits=trial_limits())),
    )
    (matcher,) = made
    if not matcher.is_error():
        _run(WALK_STACK_BYTES, lambda: _walk(matcher))
    sys.stdout.write(matcher.get_error())


def _run(stack_bytes: int, work: Callable[[], None]) -> None:
    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _walk(matcher: Any) -> None:
    """Takes allowed bytes, every time another one in turn."""
    for step in range(WALK_STEPS):
        if matcher.is_stopped():
            return
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(256) if mask[token // 8] >> (token % 8) & 1]
        if not allowed or matcher.is_error():
            return
        matcher.consume_token(allowed[step * 7919 % len(allowed)])


if __name__ == "__main__":
    main()

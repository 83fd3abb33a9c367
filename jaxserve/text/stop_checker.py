"""Stop strings in streamed text.

Each stop string is followed by a Knuth-Morris-Pratt automaton whose state is the length of the longest prefix
of the stop string that ends the text so far. Work is constant per character and stop string, and the result
does not depend on how the text was cut into deltas.

Rules:
- The first stop string to be completed ends the text; of several completed by the same character, the longest.
- Held back is exactly the longest end of the text that may still become a stop string, so always less than the
  longest stop string. With `include_stop_str_in_output` nothing needs holding.
- Only text that is fed counts: a prompt never takes part in a match.
"""

from __future__ import annotations


class StopChecker:
    """Finds the first stop string in the text of one sequence."""

    def __init__(self, stop: tuple[str, ...], include_stop_str_in_output: bool = False) -> None:
        """Prepares the automata.

        Args:
          stop: stop strings; none of them empty.
          include_stop_str_in_output: emit the stop string itself too.

        Raises:
          ValueError: a stop string is empty.
        """
        if "" in stop:
            raise ValueError('stop holds ""; a stop string must have at least one character')
        # Longest first: the first to complete at a character is then the one that wins there.
        self._stop = sorted(set(stop), key=lambda text: (-len(text), text))
        self._failure = [_failure_table(text) for text in self._stop]
        self._states = [0] * len(self._stop)
        self._include = include_stop_str_in_output
        self._held = ""
        self.stopped: str | None = None

    @property
    def num_held(self) -> int:
        """Characters held back now."""
        return len(self._held)

    def feed(self, text: str) -> tuple[str, str | None]:
        """Takes more text.

        Returns:
          The text that may be shown, and the stop string if one is complete. After that everything fed is
          dropped.
        """
        if self.stopped is not None:
            return "", self.stopped
        if not self._stop:
            return text, None
        for index, character in enumerate(text):
            completed = self._advance(character)
            if completed is not None:
                self.stopped = completed
                seen = self._held + text[: index + 1]
                self._held = ""
                if self._include:
                    return seen, completed
                return seen[: len(seen) - len(completed)], completed
        if self._include:
            return text, None
        seen = self._held + text
        cut = len(seen) - max(self._states)
        self._held = seen[cut:]
        return seen[:cut], None

    def flush(self) -> str:
        """The text still held when the sequence ended for another reason."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Moves every automaton by one character; the stop string completed by it, if any."""
        for number, text in enumerate(self._stop):
            state = self._states[number]
            failure = self._failure[number]
            while state and text[state] != character:
                state = failure[state - 1]
            if text[state] == character:
                state += 1
            self._states[number] = state
            if state == len(text):
                return text
        return None


def _failure_table(text: str) -> list[int]:
    """For each prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = table[length - 1]
        if text[index] == text[length]:
            length += 1
        table[index] = length
    return table

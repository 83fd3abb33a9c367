"""FailedSteps: what the scheduler can do when a step has failed on the device.

`recover` takes back everything that is in flight. Whoever had a slot, or a last row on its way, stands at the front of
the queue then and computes its prompt and outputs again; nobody holds a page. `hold` and `release` keep a request from
running meanwhile, and `limit_budget` makes plans smaller than the settings say. Each call is in the trace.
"""

from __future__ import annotations

from jaxserve.scheduler.row_lander import RowLander
from jaxserve.scheduler.sequence import NO_SLOT, Sequence
from jaxserve.scheduler.state import Flight


class FailedSteps(RowLander):
    """The scheduler's tables, and the ways back after a failure."""

    def recover(self, now: float, *, keeps_cache: bool) -> list[Flight]:
        """Forgets every plan in flight; their numbers are given again.

        Pages and promises of all are free, those on the host too. Requests that wait for K/V from elsewhere, and never
        ran, keep it; others compute theirs. What a plan in flight was to export is lost: the caller ends such requests.

        Args:
          keeps_cache: what every page held before the plans in flight is still there. A prefix cache is dropped all the
            same where layers have windows: a page given back is entered before it is written.

        Returns:
          The plans, oldest first, with the sequences of their rows.
        """
        if self._trace:
            self._trace.recovered(now, keeps_cache=keeps_cache)
        dropped = list(self._in_flight)
        self._in_flight.clear()
        self._num_plans -= len(dropped)
        if not keeps_cache or any(self._windows):
            self._pages.drop_cache()
        self._preempted, self._returning = [], []
        self._swaps, self._imports, self._exports, self._passed = [], [], [], []
        in_rows = [sequence for flight in dropped for sequence in (*flight.decode, *flight.prefill)]
        for sequence in in_rows:
            sequence.num_in_flight -= 1
        for sequence in in_rows:
            if sequence.finish_reason is not None:
                self._release_pages(sequence)
        running = list(self._running.values())
        for sequence in running:
            self._vacate(sequence)
        waiting = list(self._waiting)
        landing = [sequence for sequence in dict.fromkeys(in_rows) if sequence.finish_reason is None]
        interrupted = dict.fromkeys(running + [each for each in landing if each not in self._waiting])
        for sequence in sorted(interrupted, key=lambda each: each.turn):
            self._restart(sequence)
            self._waiting.push_first(sequence)
        for sequence in waiting:
            if sequence.turn < 0 or sequence.num_to_import:
                continue
            if sequence in self._waiting.held:
                self._restart(sequence)
                continue
            self._waiting.remove(sequence)
            self._restart(sequence)
            self._waiting.push_first(sequence)
        self.counters.recoveries += 1
        return dropped

    def hold(self, request_id: str, now: float) -> bool:
        """Keeps a request that waits from running until it is released; it may end meanwhile.

        As long as somebody is held, no arrival takes a slot, and of those that wait only those run that had one when a
        step failed, or since.

        Returns:
          False where no live request of this id waits.
        """
        sequence = self._live.get(request_id)
        if sequence is None or not self._waiting.hold(sequence):
            return False
        if self._trace:
            self._trace.of_request("hold", request_id, now)
        return True

    def release(self, request_id: str, now: float) -> bool:
        """Lets a held request run again, ahead of those that never had a slot; False where it is not held."""
        sequence = self._live.get(request_id)
        if sequence is None or not self._waiting.release(sequence):
            return False
        if self._trace:
            self._trace.of_request("release", request_id, now)
        return True

    def limit_budget(self, num_tokens: int, now: float) -> None:
        """From now on a plan has at most so many tokens, and so many requests hold a slot; those that do keep theirs.

        Below the settings' `max_num_batched_tokens` no plan has several steps.
        """
        most = self.config.max_num_batched_tokens
        assert 1 <= num_tokens <= most, f"the token budget is to be {num_tokens}; it is between 1 and {most}"
        self._budget = num_tokens
        if self._trace:
            self._trace.budget_limited(num_tokens, now)

    def _restart(self, sequence: Sequence) -> None:
        """Of one without slot and rows in flight: nothing of it is computed."""
        self._release_pages(sequence)
        self._free_host_pages(sequence)
        assert sequence.slot == NO_SLOT and not sequence.num_held_pages, f"{sequence.request_id} runs"
        sequence.num_scheduled = sequence.num_to_import = 0
        sequence.restarted = True
        sequence.num_recoveries += 1

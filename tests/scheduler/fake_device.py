"""A fake device for the scheduler's plans.

It keeps what the real one keeps, a page table and a last token per slot and the contents of every page, and changes it
by plans alone. So a plan that forgets a page, reuses one too early or resumes with a wrong token fails here, in the
iteration that does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler import StepPlan, StepResult
from jaxserve.scheduler.plan import DecodeRow, PrefillChunk

Content = tuple[Any, ...]
Memory = tuple[dict[tuple[int, int], Content], dict[tuple[int, int], Content]]


class FakeDevice:
    """Executes plans in order on a paged memory that remembers which token of which request it holds.

    Args:
      config: page size, slots and windows of the groups of layers.
      sample: token of (request id, position).
    """

    def __init__(self, config: SchedulerConfig, sample: Callable[[str, int], int]) -> None:
        self._page_size = config.page_size
        self._windows = config.windows
        self._runs_several = config.max_decode_steps > 1
        # By slot and group.
        self._tables: list[list[dict[int, int]]] = [[{} for _ in self._windows] for _ in range(config.max_num_seqs)]
        self._last_token = [-1] * config.max_num_seqs
        self._memory: dict[tuple[int, int], Content] = {}  # by (page, offset)
        self._host: dict[tuple[int, int], Content] = {}  # likewise, of the host pool
        self._sample = sample
        self.exported: dict[tuple[str, int, int], tuple[Content, ...]] = {}  # by request id, group and page

    def run(
        self,
        plan: StepPlan,
        content_of: Callable[[str, int], Content],
        has_ended: Callable[[str, int], bool] = lambda request_id, position: False,
    ) -> StepResult:
        """Writes every row's K/V, then checks that every row finds its whole context.

        Args:
          content_of: what K/V of a request's token at a position is; its last item is the token.
          has_ended: whether the token at a position ends its request by its id.
        """
        for swap in plan.swaps:
            for page, host_page in zip(swap.page_ids, swap.host_page_ids, strict=True):
                assert page != 0, f"{swap.request_id} swaps the null page"
                if swap.out:
                    self._copy(self._memory, page, self._host, host_page)
                else:
                    self._copy(self._host, host_page, self._memory, page)
        for move in plan.imports:
            assert move.page_ids, f"{move.request_id} imports no page"
            for index, page in enumerate(move.page_ids, move.first):
                assert page != 0, f"{move.request_id} imports the null page"
                for offset in range(self._page_size):
                    content = content_of(move.request_id, index * self._page_size + offset)
                    self._memory[page, offset] = (move.group, content)
        for placement in plan.placements:
            self._tables[placement.slot] = [{} for _ in self._windows]
            self._last_token[placement.slot] = placement.last_token_id
        for update in plan.pages:
            for index, page in enumerate(update.page_ids, update.first):
                assert page != 0 or self._windows[update.group], f"slot {update.slot} got the null page"
                self._tables[update.slot][update.group][index] = page
        if plan.num_steps > 1:
            assert not plan.prefill
            return StepResult((), (), self._run_steps(plan, content_of, has_ended))
        # A row of several steps stops where its request ends; what comes after it, until the host knows, is in vain.
        decode = [row for row in plan.decode if not (self._runs_several and has_ended(row.request_id, row.position))]
        spans = [(row.request_id, row.slot, row.position, row.position + 1) for row in decode]
        spans += [(c.request_id, c.slot, c.start, c.start + len(c.token_ids)) for c in plan.prefill]
        for request_id, slot, start, end in spans:
            for position in range(start, end):
                self._write(slot, position, content_of(request_id, position))
        for row in (*decode, *plan.prefill):
            start = row.position if isinstance(row, DecodeRow) else row.start
            self._check_context(row, start, start + 1 if isinstance(row, DecodeRow) else row.end, content_of)
        for chunk in plan.prefill:
            for position, token in enumerate(chunk.token_ids, chunk.start):
                right = content_of(chunk.request_id, position)[-1]
                assert token == right, f"{chunk.request_id} is fed {token} at {position}, not {right}"
        for row in decode:
            fed, right = self._last_token[row.slot], self._sample(row.request_id, row.position)
            assert fed == right, f"{row.request_id} is fed {fed} at {row.position}, not {right}"
        sampled = [self._sample(request_id, end) for request_id, _, _, end in spans]
        emits = [True] * len(decode) + [chunk.emits for chunk in plan.prefill]
        for (_, slot, _, _), token, emitted in zip(spans, sampled, emits, strict=True):
            if emitted:
                self._last_token[slot] = token
        self._export(plan, content_of)
        token_of = {slot: token for (_, slot, _, _), token in zip(spans, sampled, strict=True)}
        return StepResult(tuple(token_of.get(row.slot, -1) for row in plan.decode), tuple(sampled[len(decode) :]))

    @property
    def memory(self) -> Memory:
        """What is written: pages, and those of the host."""
        return dict(self._memory), dict(self._host)

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self._memory, self._host = (dict(part) for part in memory)

    def forget(self, request_id: str) -> None:
        """A new request has this id: what another one exported is not its own."""
        self.exported = {key: page for key, page in self.exported.items() if key[0] != request_id}

    def _export(self, plan: StepPlan, content_of: Callable[[str, int], Content]) -> None:
        """Every page that leaves is full, and leaves once."""
        for move in plan.exports:
            assert move.page_ids, f"{move.request_id} exports no page"
            for index, page in enumerate(move.page_ids, move.first):
                key = (move.request_id, move.group, index)
                assert key not in self.exported, f"{key} is exported twice"
                positions = range(index * self._page_size, (index + 1) * self._page_size)
                found = tuple(self._memory[page, position % self._page_size] for position in positions)
                wanted = tuple((move.group, content_of(move.request_id, position)) for position in positions)
                assert found == wanted, f"{key} leaves with {found}"
                self.exported[key] = found

    def _run_steps(
        self,
        plan: StepPlan,
        content_of: Callable[[str, int], Content],
        has_ended: Callable[[str, int], bool],
    ) -> tuple[tuple[int, ...], ...]:
        """Row after row, as none sees another; a row whose request ended before is not run."""
        runs = []
        for row in plan.decode:
            run: list[int] = []
            position = row.position
            while len(run) < row.num_steps and not has_ended(row.request_id, position):
                fed, right = self._last_token[row.slot], self._sample(row.request_id, position)
                assert fed == right, f"{row.request_id} is fed {fed} at {position}, not {right}"
                self._write(row.slot, position, content_of(row.request_id, position))
                self._check_context(row, position, position + 1, content_of)
                position += 1
                run.append(self._sample(row.request_id, position))
                self._last_token[row.slot] = run[-1]
            runs.append(tuple(run))
        return tuple(runs)

    def _check_context(
        self, row: DecodeRow | PrefillChunk, start: int, end: int, content_of: Callable[[str, int], Content]
    ) -> None:
        """Tokens [start, end) of a row find all that they see; pages that none of a plan's sees are the null page."""
        for group, window in enumerate(self._windows):
            first = max(start + 1 - window, 0) if window else 0
            for position in range(first, end):
                page, offset = self._place(row.slot, group, position)
                assert page != 0, f"{row.request_id} sees the null page at {position}"
                found, wanted = self._memory.get((page, offset)), (group, content_of(row.request_id, position))
                assert found == wanted, f"{row.request_id} finds {found} at {position} of group {group}"
            if start == (row.position if isinstance(row, DecodeRow) else row.start):
                passed = [self._tables[row.slot][group][index] for index in range(first // self._page_size)]
                assert not any(passed), f"{row.request_id} keeps {passed} that it does not see any more"

    def _write(self, slot: int, position: int, content: Content) -> None:
        for group in range(len(self._windows)):
            self._memory[self._place(slot, group, position)] = (group, content)

    def _copy(
        self, source: dict[tuple[int, int], Content], page: int, target: dict[tuple[int, int], Content], to: int
    ) -> None:
        for offset in range(self._page_size):
            target.pop((to, offset), None)
            if (page, offset) in source:
                target[to, offset] = source[page, offset]

    def _place(self, slot: int, group: int, position: int) -> tuple[int, int]:
        return self._tables[slot][group][position // self._page_size], position % self._page_size

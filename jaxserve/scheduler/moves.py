"""Moves: the elementary moves of requests between places.

They know nothing of why a request moves; `Scheduler` decides. Each move here leaves slots, pages,
reservation and queue consistent with each other, so the decisions can be read without the bookkeeping.
"""

from __future__ import annotations

from jaxserve.config.engine_config import first_page_seen
from jaxserve.scheduler.holding import Holding
from jaxserve.scheduler.plan import PageMove, PageSwap
from jaxserve.scheduler.prefix_cache import Found, page_name, root_of
from jaxserve.scheduler.sequence import NO_SLOT, Sequence
from jaxserve.scheduler.state import Flight, SchedulerState


class Moves(SchedulerState):
    """The scheduler's tables and the moves."""

    def _reserve(self, sequence: Sequence, victim: Sequence | None = None) -> bool:
        """Promises a sequence its pages and gives it those that the prefix cache has; False: no change."""
        found = self._cached_pages(sequence)
        if not self._reservation.reserve(sequence, self._running.values(), victim=victim, found=found):
            return False
        if found is not None:
            for holding, (first, shared) in zip(sequence.holdings, found, strict=True):
                self._pages.share(shared, passing=holding.gives_back)
                holding.pages += shared
                holding.num_passed = first
            sequence.num_named_pages = min([first + len(shared) for first, shared in found])
        if sequence.num_pages and not sequence.num_scheduled:
            sequence.num_scheduled = sequence.num_pages * self.config.page_size
            self.counters.cached_tokens += sequence.num_scheduled
            if not sequence.num_preemptions and not sequence.num_recoveries:
                sequence.num_cached_tokens = sequence.num_scheduled
        return True

    def _cached_pages(self, sequence: Sequence) -> list[Found] | None:
        """Pages of its beginning, by group; the last token is always computed, and so are prompts that want scores.

        Of one that was swapped out, or whose pages are to be imported, those that are there need not be copied. With a
        sliding window the pages before a token and its window are not needed: a beginning is found by its last pages.

        Returns:
          None where nothing is looked for.
        """
        config, cache = self.config, self._pages.cache
        if not config.enable_prefix_caching or sequence.num_held_pages:
            return None
        if sequence.is_swapped_out or sequence.num_to_import:
            count = sequence.num_scheduled // config.page_size
            self._name_pages(sequence, count)
            names = sequence.page_names
            return [
                Found(each.num_passed, cache.find(names[each.num_passed : count], each.group))
                for each in sequence.holdings
            ]
        if sequence.num_scheduled or sequence.request.params.prompt_logprobs is not None:
            return None
        count = (sequence.num_known_tokens - 1) // config.page_size
        self._name_pages(sequence, count)
        return cache.find_beginning(sequence.page_names[:count], self._seen_pages)

    def _name_pages(self, sequence: Sequence, count: int) -> None:
        size, names = self.config.page_size, sequence.page_names
        while len(names) < count:
            parent = names[-1] if names else root_of(sequence.request)
            names.append(page_name(parent, sequence.token_ids(len(names) * size, (len(names) + 1) * size)))

    def _remember_pages(self, sequence: Sequence, num_written: int) -> None:
        """Enters the full pages among the first `num_written` tokens in the prefix cache."""
        count = num_written // self.config.page_size
        self._name_pages(sequence, count)
        names, enter = sequence.page_names, self._pages.cache.enter
        for holding in sequence.holdings:
            passed = holding.num_passed
            for index in range(max(sequence.num_named_pages, passed), count):
                enter(names[index], holding.pages[index - passed], holding.group)
        sequence.num_named_pages = max(sequence.num_named_pages, count)

    def _forget_pages(self, sequence: Sequence) -> None:
        """Takes every full page of it out of the prefix cache, whoever entered it."""
        filled = max(sequence.num_prompt_tokens, sequence.num_known_tokens - 1)
        self._name_pages(sequence, filled // self.config.page_size)
        self._pages.forget(sequence.page_names, len(self._windows))

    def _pass_pages(self) -> None:
        """Gives back what no plan from now on reads; the next plan tells the device, whose steps run in order."""
        size, running = self.config.page_size, self._running.values()
        for group, least in self._passing:
            behind = [each for each in running if each.num_scheduled - each.holdings[group].num_passed * size >= least]
            for sequence in behind:
                window = self._windows[group]
                for holding in sequence.holdings:
                    if holding.window == window:
                        first, count = holding.num_passed, self._give_passed(sequence, holding)
                        self._passed.append((sequence, sequence.slot, holding.group, first, count))

    def _give_passed(self, sequence: Sequence, holding: Holding) -> int:
        """Gives back the pages of a group whose tokens the next row of `sequence` does not see; how many."""
        if not holding.gives_back:
            return 0
        config = self.config
        passed = max(sequence.num_scheduled + 1 - holding.window, 0) // config.page_size
        count = passed - holding.num_passed
        if not count:
            return 0
        if config.enable_prefix_caching:
            # A step in flight may still have to write them. Its tokens are not all known if it has several steps.
            known = max(sequence.num_prompt_tokens, sequence.num_known_tokens - 1)
            self._remember_pages(sequence, min(passed * config.page_size, known))
        self._pages.release(holding.pages[:count], passing=True)
        del holding.pages[:count]
        holding.num_passed = passed
        self._reservation.passed(sequence, holding, count)
        return count

    def _new_holdings(self, sequence: Sequence) -> list[Holding]:
        """Empty ones of a sequence that has just come, one for each group."""
        tokens, size = sequence.num_kv_tokens, self.config.page_size
        return [
            Holding(group, window, window > 0 and tokens >= window + size) for group, window in enumerate(self._windows)
        ]

    def _remember_written(self, flight: Flight) -> None:
        """A step came back: what it wrote can be shared from now on."""
        size = self.config.page_size
        # Tokens of several steps are not known yet: `RowLander` remembers them one by one.
        rows = zip(flight.decode, flight.plan.decode.positions, strict=True) if flight.plan.num_steps == 1 else ()
        # A decode row can fill a page only by the page's last token.
        written = [(sequence, position + 1) for sequence, position in rows if not (position + 1) % size]
        written += [(sequence, chunk.end) for sequence, chunk in zip(flight.prefill, flight.plan.prefill, strict=True)]
        for sequence, num_written in written:
            if sequence.finish_reason is None and not sequence.restarted and not sequence.is_swapped_out:
                self._remember_pages(sequence, num_written)

    def _enter(self, sequence: Sequence) -> None:
        """It asks for service; `_leave` when it no longer does."""
        if self._order.counters is not None:
            self._order.counters.enter(sequence.request.tenant)

    def _leave(self, sequence: Sequence) -> None:
        if self._order.counters is not None:
            self._order.counters.leave(sequence.request.tenant)

    def _occupy(self, sequence: Sequence) -> None:
        sequence.slot = self._slots.take()
        self._running[sequence.slot] = self._unplaced[sequence.slot] = sequence
        sequence.num_outputs_at_start = len(sequence.output_token_ids)
        if sequence.restarted:
            sequence.restarted = False
            sequence.num_prefill_tokens = sequence.num_known_tokens
        if sequence.is_swapped_out:
            self._swap_in(sequence)
        if sequence.request.service_class in self._num_slots_held:
            self._num_slots_held[sequence.request.service_class] += 1
        if self._order.counters is not None:
            self._order.counters.serve(sequence.request.tenant)
        sequence.turn = self._num_promotions
        self._num_promotions += 1
        if sequence.decode_ready:
            self._decoding.join(sequence)
        else:
            self._prefilling[sequence.slot] = sequence

    def _vacate(self, sequence: Sequence) -> None:
        """Frees the slot of a sequence that holds one."""
        del self._running[sequence.slot]
        self._unplaced.pop(sequence.slot, None)
        if self._prefilling.pop(sequence.slot, None) is None:
            self._decoding.leave(sequence)
        self._slots.give(sequence.slot)
        sequence.slot = NO_SLOT
        if sequence.request.service_class in self._num_slots_held:
            self._num_slots_held[sequence.request.service_class] -= 1

    def _preempt(self, victim: Sequence) -> None:
        """Sends a sequence from its slot to the queue, with its pages, a copy of them on the host, or none."""
        self._vacate(victim)
        victim.num_preemptions += 1
        victim.num_setbacks += 1
        self.counters.preemptions += 1
        self._preempted.append(victim.request_id)
        for holding in victim.holdings:
            self._give_passed(victim, holding)
        mode = self._preemption.mode_for(victim)
        if victim.num_to_import:
            self._release_pages(victim)
            self._await_import(victim, victim.num_to_import)
        elif mode == "swap":
            self._swap_out(victim)
        elif mode == "recompute":
            self.counters.count_recomputed(victim.request.service_class, victim.num_scheduled)
            victim.num_scheduled = 0
            victim.restarted = True
            self._release_pages(victim)
        self._waiting.push(victim)

    def _swap_out(self, victim: Sequence) -> None:
        """Its pages are free for the next plan, which copies them to the host before anything else."""
        for holding in victim.holdings:
            holding.host_pages = self._host_pages.allocate(len(holding.pages))
        pages, host_pages = (
            [page for holding in victim.holdings for page in holding.pages],
            [page for holding in victim.holdings for page in holding.host_pages],
        )
        self._swap(victim, True, pages, host_pages)
        self._reservation.release(victim)
        self._give_pages(victim)
        victim.num_named_pages = 0

    def _swap_in(self, sequence: Sequence) -> None:
        """Takes promised pages for what the prefix cache no longer has of it."""
        pages: list[int] = []
        host_pages: list[int] = []
        for holding in sequence.holdings:
            lacking = holding.host_pages[len(holding.pages) :]
            self._reservation.take(sequence, holding, len(lacking))
            new = self._pages.allocate(len(lacking), passing=holding.gives_back)
            holding.pages += new
            pages += new
            host_pages += lacking
        if pages:
            self._swap(sequence, False, pages, host_pages)
        self._free_host_pages(sequence)

    def _await_import(self, sequence: Sequence, num_tokens: int) -> None:
        """Of one that holds nothing: K/V of so many tokens is to be imported when it takes a slot."""
        sequence.num_to_import = sequence.num_scheduled = num_tokens
        for holding in sequence.holdings:
            if holding.gives_back:
                holding.num_passed = first_page_seen(num_tokens, holding.window, self.config.page_size)

    def _import(self, sequence: Sequence) -> None:
        """Takes promised pages for what the prefix cache does not have of it; the plan has them filled."""
        count = sequence.num_to_import // self.config.page_size
        for holding in sequence.holdings:
            first, lacking = holding.num_pages, count - holding.num_pages
            if lacking:
                self._reservation.take(sequence, holding, lacking)
                new = self._pages.allocate(lacking, passing=holding.gives_back)
                holding.pages += new
                self._imports.append(PageMove(sequence.request_id, holding.group, first, tuple(new)))
        sequence.num_to_import = 0

    def _export(self, sequence: Sequence) -> None:
        """The plan copies out pages that it fills, of those of the prompt that a token after the prompt sees."""
        config = self.config
        count = min(sequence.num_scheduled, sequence.num_prompt_tokens) // config.page_size
        for holding in sequence.holdings:
            seen = first_page_seen(sequence.num_prompt_tokens, holding.window, config.page_size)
            first, passed = max(sequence.num_exported_pages, seen), holding.num_passed
            if first < count:
                ids = tuple(holding.pages[first - passed : count - passed])
                self._exports.append(PageMove(sequence.request_id, holding.group, first, ids))
        sequence.num_exported_pages = max(count, sequence.num_exported_pages)

    def _swap(self, sequence: Sequence, out: bool, pages: list[int], host_pages: list[int]) -> None:
        self._swaps.append(PageSwap(sequence.request_id, out, tuple(pages), tuple(host_pages)))
        self.counters.count_swapped(sequence.request.service_class, len(pages))

    def _free_host_pages(self, sequence: Sequence) -> None:
        for holding in sequence.holdings:
            self._host_pages.release(holding.host_pages)
            holding.host_pages = []

    def _release_pages(self, sequence: Sequence) -> None:
        """Gives back promises at once, and pages as soon as no step in flight can touch them."""
        self._reservation.release(sequence)
        if sequence.num_in_flight and sequence.num_held_pages:
            return
        self._give_pages(sequence)
        for holding in sequence.holdings:
            holding.num_passed = 0
        sequence.num_named_pages = 0

    def _give_pages(self, sequence: Sequence) -> None:
        """Releases all that it holds."""
        for holding in sequence.holdings:
            self._pages.release(holding.pages, passing=holding.gives_back)
            holding.pages = []

"""RowLander: what the return of a step means for its requests: tokens, ends, pages to give back."""

from __future__ import annotations

from collections.abc import Sequence as Items

from jaxserve.core import FinishReason
from jaxserve.scheduler.lifecycle import Lifecycle
from jaxserve.scheduler.plan import TokenEvent
from jaxserve.scheduler.row_planner import RowPlanner
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.state import Flight
from jaxserve.scheduler.token_events import TokenEvents


class RowLander(Lifecycle, RowPlanner):
    """Takes in the rows of steps that came back, and ends requests."""

    def _land_decode(self, flight: Flight, tokens: Items[int], now: float) -> TokenEvents:
        """Decode rows came back, each with a token. Gives their events, and leaves those of chunks to be set.

        Nearly every row brings a token and nothing else. The loop over all goes without calls and sets aside those
        for which there may be more to do.
        """
        others: list[Sequence] = []
        for sequence, token in zip(flight.decode, tokens, strict=True):
            sequence.num_in_flight -= 1
            if sequence.finish_reason is not None:
                others.append(sequence)
            else:
                sequence.output_token_ids.append(token)
                if token in sequence.stop_ids or sequence.restarted:
                    others.append(sequence)
        ends: dict[int, TokenEvent] = {}
        dropped: list[int] = []
        for row in dict.fromkeys(sorted(flight.last_rows + [flight.decode.index(other) for other in others])):
            event = self._settle(flight.decode[row], tokens[row], "decode", row, now)
            if event is None:
                dropped.append(row)
            elif event.finish_reason is not None:
                ends[row] = event
        request_ids = flight.plan.decode.request_ids
        if not dropped:
            return TokenEvents(request_ids, tokens, range(len(tokens)), ends)
        rows = [row for row in range(len(tokens)) if row not in dropped]
        events = TokenEvents([request_ids[row] for row in rows], [tokens[row] for row in rows], rows, ends)
        events.num_wasted = len(dropped)
        return events

    def _land_runs(self, flight: Flight, runs: Items[Items[int]], now: float) -> TokenEvents:
        """Decode rows of several steps came back, each with its tokens. Gives their events."""
        rows = flight.plan.decode
        ids: list[str] = []
        firsts: list[int] = []
        others: list[Items[int]] = []
        kept: list[int] = []
        events = TokenEvents(ids, firsts, kept, later=others)
        for row, (sequence, run) in enumerate(zip(flight.decode, runs, strict=True)):
            sequence.num_in_flight -= 1
            tokens = self._tokens_of(sequence, run) if sequence.finish_reason is None else ()
            events.num_wasted += len(run) - len(tokens)
            if tokens:
                sequence.output_token_ids += tokens
                self._remember_run(sequence, rows.positions[row] + len(tokens))
            event = self._settle(sequence, tokens[-1] if tokens else None, "decode", row, now)
            if event is None:
                continue
            has_ended = event.finish_reason is not None
            assert has_ended or len(run) == rows.num_steps[row], f"{sequence.request_id} brought {len(run)} tokens"
            ids.append(sequence.request_id)
            firsts.append(tokens[0])
            others.append(tokens[1:])
            kept.append(row)
            if has_ended:
                events.ends[row] = event
        return events

    def _tokens_of(self, sequence: Sequence, run: Items[int]) -> Items[int]:
        """Those of `run` up to the sequence's end."""
        num_outputs = len(sequence.output_token_ids)
        assert run, f"{sequence.request_id} is live and brought no token"
        if sequence.stop_ids.isdisjoint(run):
            return run
        for count, token in enumerate(run, 1):
            if token in sequence.stop_ids and num_outputs + count > sequence.request.params.min_tokens:
                return run[:count]
        return run

    def _remember_run(self, sequence: Sequence, num_written: int) -> None:
        """The first `num_written` tokens of a live sequence are in its pages, before it may end and give them back."""
        if not self.config.enable_prefix_caching or sequence.restarted or sequence.is_swapped_out:
            return
        if num_written // self.config.page_size > sequence.num_named_pages:
            self._remember_pages(sequence, num_written)

    def _land_prefill(self, flight: Flight, tokens: Items[int], now: float, events: TokenEvents) -> None:
        """Chunks came back, each with a token that counts if the chunk emits. Adds their events."""
        rows = zip(flight.plan.prefill, flight.prefill, tokens, strict=True)
        for row, (chunk, sequence, sampled) in enumerate(rows):
            token = sampled if chunk.emits else None
            sequence.num_in_flight -= 1
            if sequence.finish_reason is not None:
                events.num_wasted += 1
            elif token is not None:
                sequence.output_token_ids.append(token)
            event = self._settle(sequence, token, "prefill", row, now)
            if event is not None:
                events.prefill.append(event)

    def _settle(self, sequence: Sequence, token: int | None, source: str, row: int, now: float) -> TokenEvent | None:
        """Ends a sequence that a row has brought to its end, and gives back the pages of one that lost them.

        Args:
          token: what the row sampled, already among the outputs; None for a chunk that emits nothing.
          source: "decode" or "prefill".

        Returns:
          The row's token, its end, or both in one; None when it brought neither to a live request.
        """
        if sequence.finish_reason is not None or sequence.restarted:
            self._release_pages(sequence)
        if sequence.finish_reason is not None:
            return None
        reason: FinishReason | None = None
        stop_token_id: int | None = None
        if token is None:
            if not sequence.fully_scheduled or sequence.num_in_flight or sequence.restarted:
                return None
            reason = FinishReason.LENGTH  # max_tokens is 0: the prompt's scores were all it asked for
        elif token in sequence.stop_ids and len(sequence.output_token_ids) > sequence.request.params.min_tokens:
            reason, stop_token_id = FinishReason.STOP, token
        elif len(sequence.output_token_ids) == sequence.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(sequence, reason, now)
        return TokenEvent(sequence.request_id, token, source, row, reason, stop_token_id)

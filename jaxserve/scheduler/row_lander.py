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

"""Grammars and barred words of live requests: which tokens each row of a step may sample, and where its output ends.

A request's state follows its output token by token, on the host alone; so a preemption, whatever becomes of pages
and slots, leaves it as it is. Rules where a grammar meets the request's other settings:

- the mask is the grammar's, less what `allowed_token_ids` and `bad_words` bar; if nothing is left, the request fails,
  when it is submitted or when that shows;
- EOS is in it where the grammar may end, but not under `ignore_eos`, nor before `min_tokens`;
- an output ends, with reason "stop", when its grammar allows nothing more, `min_tokens` or not. That is mostly known
  when its last token is there; where it shows only in the next mask, the token sampled meanwhile is dropped. What a
  mask shows takes effect with that token, as masks may be made before the token ahead of it is delivered.

Words of `bad_words` that are several tokens go the same way, with a grammar or without: then the mask is everything,
less what `allowed_token_ids`, `bad_words` and `min_tokens` bar; if nothing is left, the request fails.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from absl import logging
from numpy.typing import NDArray

from jaxserve.core import Request, RequestFailedError, StructuredOutputs, UnfollowableError
from jaxserve.engine.validation import ModelLimits
from jaxserve.engine.word_tail import WordTail
from jaxserve.faults import failpoint
from jaxserve.scheduler import StepPlan
from jaxserve.scheduler.plan import StepResult
from jaxserve.tables import Bucket
from jaxserve.text import CompiledGrammar, GrammarCompiler, Tokenizer, is_internal, matcher_fault

Rows = Sequence[tuple[int, "GrammarState"]]
"""Sample rows of a step that a grammar or a word of several tokens binds, each with its request's state."""
_EVERYTHING = np.uint32(0xFFFFFFFF)


class GrammarState:
    """One request's place in its grammar, and how its output ends where words may not be completed.

    Attributes:
      request_id: the request's.
      matcher: of the grammar, if there is one.
      ended: nothing can follow what was accepted.
      closed: the request is no longer live; rows of it may still be in flight.
      dropped: the last token that was sampled is no part of the output, which had ended before it.

    Args:
      num_known: ids below this may be sampled; under a grammar, those that the tokenizer and the model have.
      vocab_size: the model's, V.
    """

    def __init__(self, grammar: CompiledGrammar | None, request: Request, num_known: int, vocab_size: int) -> None:
        self.request_id = request.request_id
        self.matcher = None if grammar is None else grammar.start()
        self.ended = False
        self.dropped = False
        self.closed = False
        self._fault: RequestFailedError | None = None
        self._ends_next = False  # what the last mask showed
        self._next_fault: RequestFailedError | None = None
        self._num_accepted = 0
        params = request.params
        self._min_tokens = params.min_tokens
        self._restricting = [
            name
            for name, is_given in (
                ("bad_words", params.bad_words),
                ("allowed_token_ids", params.allowed_token_ids is not None),
                ("min_tokens", grammar is None and params.min_tokens),
            )
            if is_given
        ]
        # Where a grammar allows nothing but stop ids, they are let through.
        self._end_ids = list(request.stop_ids if grammar is None else request.eos_token_ids)
        self._ends_barred = params.ignore_eos and grammar is not None
        self._word_tail = WordTail(request.bad_sequences) if request.bad_sequences else None
        self._permitted: NDArray[np.uint32] | None = None
        self._no_ends: NDArray[np.uint32] | None = None
        if grammar is None or params.allowed_token_ids is not None or request.bad_token_ids or num_known < vocab_size:
            self._permitted = _permitted(request, num_known, vocab_size)
        if self._ends_barred or params.min_tokens:
            self._no_ends = ~_packed(_bits(self._end_ids, vocab_size))

    def restrict(self, mask: NDArray[np.uint32]) -> None:
        """Takes out of a mask what the request's other settings bar; an empty one is left full and ends the output.

        Args:
          mask: uint32[ceil(V / 32)], the grammar's; without one, everything.
        """
        barred = self._word_tail.barred() if self._word_tail else ()
        if self._permitted is None and self._no_ends is None and not barred:
            return
        may_end = self.matcher is not None and any(mask[i // 32] >> np.uint32(i % 32) & 1 for i in self._end_ids)
        if self._permitted is not None:
            mask &= self._permitted
        if self._no_ends is not None and (self._ends_barred or self._num_accepted < self._min_tokens):
            mask &= self._no_ends
        for token_id in barred:
            mask[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        if mask.any():
            return
        mask[:] = _EVERYTHING
        if may_end:
            self._ends_next = True
        else:
            self.fail(UnfollowableError(self._nothing_left()))

    def advance(self, token_id: int) -> None:
        """Notes the token that was sampled, which the matcher was given, unless the output is over."""
        self.ended = self.ended or self._ends_next
        self._fault = self._fault or self._next_fault
        if self.over:
            self.dropped = True
            return
        self._num_accepted += 1
        if self._word_tail is not None:
            self._word_tail.append(token_id)
        if self.matcher is None:
            return
        fault = matcher_fault(self.matcher)
        if fault is not None:
            kind = RequestFailedError if is_internal(fault) else UnfollowableError
            self._fault = kind(f"structured_outputs could not be followed: {fault}")
        else:
            self.ended = bool(self.matcher.is_stopped())

    @property
    def over(self) -> bool:
        """Whether the output has ended or failed, so that a token sampled meanwhile is no part of it."""
        return self.ended or self._ends_next or self.failed

    @property
    def fault(self) -> RequestFailedError | None:
        """What `check` raises, if not now then with the next token."""
        return self._fault or self._next_fault

    @property
    def failed(self) -> bool:
        """Whether there is a fault."""
        return self.fault is not None

    def fail(self, fault: RequestFailedError) -> None:
        """Makes the request end by this error, with the next token."""
        self._next_fault = fault

    def check(self) -> None:
        """Raises RequestFailedError if the output cannot go on: an UnfollowableError where its own settings are why."""
        if self._fault is not None:
            raise self._fault

    def _nothing_left(self) -> str:
        where = f"after {self._num_accepted} output tokens"
        if not self._restricting:
            return f"structured_outputs allows no token of the model's vocabulary {where}"
        which = "" if self.matcher is None else " of those that structured_outputs allows"
        verb = "leaves" if len(self._restricting) == 1 else "leave"
        return f"{' and '.join(self._restricting)} {verb} no token{which} {where}"


@dataclass(slots=True)
class GrammarTimes:
    """Sums over iterations, for reports: seconds of masks, of following tokens, and tokens sampled under a mask."""

    mask_s: float = 0.0
    accept_s: float = 0.0
    masked_tokens: int = 0


class GrammarStates:
    """Compiles grammars, and holds the states of the live requests that have one or words of several tokens.

    Args:
      tokenizer: the model's; without one there are no grammars.
      limits: of the model.
      max_bytes: longest text of a constraint.

    Attributes:
      times: what grammars cost.
    """

    def __init__(self, tokenizer: Tokenizer | None, limits: ModelLimits, max_bytes: int) -> None:
        self._compiler = tokenizer and GrammarCompiler(
            tokenizer, vocab_size=limits.vocab_size, eos_token_ids=limits.eos_token_ids, max_bytes=max_bytes
        )
        self._vocab_size = limits.vocab_size
        self._live: dict[str, GrammarState] = {}
        self.times = GrammarTimes()

    @property
    def compiler(self) -> GrammarCompiler:
        """The model's.

        Raises:
          ValueError: there is no tokenizer.
        """
        if self._compiler is None:
            raise ValueError("structured_outputs needs a tokenizer; none is loaded (skip_tokenizer_init)")
        return self._compiler

    def prepare(self) -> None:
        """Reads the vocabulary ahead of the first grammar, if there is one; from any thread."""
        if self._compiler is not None:
            self._compiler.prepare()

    def compile(self, wanted: StructuredOutputs) -> CompiledGrammar:
        """See `GrammarCompiler.compile`; from any thread."""
        return self.compiler.compile(wanted)

    def check(self, request: Request) -> None:
        """Raises ValueError if the request's other settings leave no token that its grammar lets an output begin with.

        From any thread.
        """
        if request.grammar is None or (request.params.allowed_token_ids is None and not request.bad_token_ids):
            return
        state = self._state(request)
        assert isinstance(request.grammar, CompiledGrammar), request.request_id
        state.restrict(self.compiler.first_mask(request.grammar))
        if state.fault is not None:
            raise ValueError(str(state.fault))

    def add(self, request: Request) -> GrammarState | None:
        """The state of a request that begins; None where no mask is needed."""
        if not request.masked:
            return None
        state = self._live[request.request_id] = self._state(request)
        return state

    def drop(self, request_id: str) -> None:
        """Forgets a request that ended."""
        state = self._live.pop(request_id, None)
        if state is not None:
            state.closed = True

    def _state(self, request: Request) -> GrammarState:
        grammar = request.grammar
        assert grammar is None or isinstance(grammar, CompiledGrammar), request.request_id
        num_known = self._vocab_size if grammar is None else self.compiler.num_known
        return GrammarState(grammar, request, num_known, self._vocab_size)

    def rows(self, plan: StepPlan, bucket: Bucket) -> Rows:
        """The rows of a plan that sample under a mask."""
        live = self._live
        if not live:
            return ()
        found = [(row, live[name]) for row, name in enumerate(plan.decode.request_ids) if name in live]
        for row, chunk in enumerate(plan.prefill, bucket.decode_rows):
            if chunk.emits and chunk.request_id in live:
                found.append((row, live[chunk.request_id]))
        return found

    def masks(self, rows: Rows, bucket: Bucket) -> NDArray[np.uint32]:
        """uint32[N, ceil(V / 32)]: what `rows` may sample; other rows hold anything, those of ended outputs too."""
        began = time.perf_counter()
        rows = [(row, state) for row, state in rows if not (state.over or state.closed)]
        # A step's own: the device may still read those of the steps in flight.
        masks = np.full((bucket.sample_rows, -(-self._vocab_size // 32)), _EVERYTHING)
        matchers = [(state.matcher, row) for row, state in rows if state.matcher is not None]
        try:
            if matchers:
                failpoint("grammar.mask", request_ids=[state.request_id for _, state in rows])
                self.compiler.fill_masks(matchers, masks)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of the Rust library is no Exception
            self._fill_one_by_one(rows, masks)
        for row, state in rows:
            if not state.failed:
                state.restrict(masks[row])
        self.times.masked_tokens += len(rows)
        self.times.mask_s += time.perf_counter() - began
        return masks

    def _fill_one_by_one(self, rows: Rows, masks: NDArray[np.uint32]) -> None:
        """After a failure of all together: only the requests that it is for end by it.

        Half a step is on the device, and other requests have their part in it.
        """
        for row, state in rows:
            if state.matcher is None:
                continue
            masks[row] = _EVERYTHING
            try:
                failpoint("grammar.mask", request_ids=[state.request_id])
                self.compiler.fill_masks([(state.matcher, row)], masks)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:
                _fail_followers([state])
                masks[row] = _EVERYTHING

    def accept(self, rows: Rows, result: StepResult, bucket: Bucket) -> None:
        """Moves the states of `rows` on by the tokens that were sampled."""
        began = time.perf_counter()
        decode = bucket.decode_rows
        tokens = [
            (state, result.decode_tokens[row] if row < decode else result.prefill_tokens[row - decode])
            for row, state in rows
        ]
        tokens = [(state, token) for state, token in tokens if not state.closed]
        followed = [(state, token) for state, token in tokens if state.matcher is not None and not state.over]
        try:
            if followed:
                self.compiler.accept([(state.matcher, token) for state, token in followed])
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # see `masks`
            _fail_followers(state for state, _ in followed)
        for state, token in tokens:
            state.advance(token)
        self.times.accept_s += time.perf_counter() - began


def _fail_followers(states: Iterable[GrammarState]) -> None:
    """Fails those that follow a grammar, in the handler of what its library raised."""
    logging.exception("llguidance failed; the requests of this step that it is for fail")
    for state in states:
        if state.matcher is not None:
            cause = "structured_outputs could not be followed: an internal error; the server's log has its cause"
            state.fail(RequestFailedError(cause))


def _permitted(request: Request, num_known: int, vocab_size: int) -> NDArray[np.uint32]:
    """The mask of what `allowed_token_ids` and words of one token leave of the known ids."""
    allowed = request.params.allowed_token_ids
    bits = _bits(slice(num_known) if allowed is None else allowed, vocab_size)
    bits[num_known:] = False
    bits[list(request.bad_token_ids)] = False
    return _packed(bits)


def _bits(token_ids: Sequence[int] | slice, vocab_size: int) -> NDArray[np.bool_]:
    """bool[V rounded up to words], set at `token_ids`."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[token_ids if isinstance(token_ids, slice) else np.asarray(token_ids, np.int64)] = True
    return bits


def _packed(bits: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """uint32[ceil(V / 32)] of them."""
    return np.packbits(bits, bitorder="little").view(np.uint32)

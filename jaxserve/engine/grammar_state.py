"""Grammars of live requests: which tokens each row of a step may sample, and where its output ends.

A request's state follows its output token by token, on the host alone; so a preemption, whatever becomes of pages
and slots, leaves it as it is. Rules where a grammar meets the request's other settings:

- the mask is the grammar's, less what `allowed_token_ids` and `bad_words` bar; if nothing is left, the request fails;
- EOS is in it where the grammar may end, but not under `ignore_eos`, nor before `min_tokens`;
- an output ends, with reason "stop", when its grammar allows nothing more, `min_tokens` or not. That is mostly known
  when its last token is there; where it shows only in the next mask, the token sampled meanwhile is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from absl import logging
from numpy.typing import NDArray

from jaxserve.core import Request, RequestFailedError, StructuredOutputs
from jaxserve.engine.validation import ModelLimits
from jaxserve.scheduler import StepPlan
from jaxserve.scheduler.plan import StepResult
from jaxserve.tables import Bucket
from jaxserve.text import CompiledGrammar, GrammarCompiler, Tokenizer, matcher_fault

Rows = Sequence[tuple[int, "GrammarState"]]
"""Sample rows of a step that a grammar binds, each with its request's state."""


class GrammarState:
    """One request's place in its grammar.

    Attributes:
      ended: nothing can follow what was accepted.
      dropped: the last token that was sampled is no part of the output, which had ended before it.

    Args:
      num_known: ids below this may be sampled: the tokenizer and the model have them.
      vocab_size: the model's, V.
    """

    def __init__(self, grammar: CompiledGrammar, request: Request, num_known: int, vocab_size: int) -> None:
        self.matcher = grammar.start()
        self.ended = False
        self.dropped = False
        self._fault: str | None = None
        self._num_accepted = 0
        params = request.params
        self._min_tokens = params.min_tokens
        self._eos_ids = list(request.eos_token_ids)
        self._eos_barred = params.ignore_eos
        self._permitted: NDArray[np.uint32] | None = None
        self._eos_words: NDArray[np.uint32] | None = None
        if params.allowed_token_ids is not None or request.bad_token_ids or num_known < vocab_size:
            ids = range(num_known) if params.allowed_token_ids is None else params.allowed_token_ids
            known = set(ids).difference(request.bad_token_ids)
            self._permitted = _packed([i for i in known if i < num_known], vocab_size)
        if params.ignore_eos or params.min_tokens:
            self._eos_words = ~_packed(self._eos_ids, vocab_size)

    def restrict(self, mask: NDArray[np.uint32]) -> None:
        """Takes out of a mask what the request's other settings bar; an empty one is left full and the output ended.

        Args:
          mask: uint32[ceil(V / 32)], the grammar's.
        """
        if self._permitted is None and self._eos_words is None:
            return
        may_end = any(mask[i // 32] >> np.uint32(i % 32) & 1 for i in self._eos_ids)
        if self._permitted is not None:
            mask &= self._permitted
        if self._eos_words is not None and (self._eos_barred or self._num_accepted < self._min_tokens):
            mask &= self._eos_words
        if mask.any():
            return
        mask[:] = 0xFFFFFFFF
        if may_end:
            self.ended = True
        else:
            self.fail("allowed_token_ids and bad_words bar every token that the grammar allows")

    def advance(self) -> None:
        """Notes what became of the token that the matcher was given."""
        if self.over:
            self.dropped = True
            return
        self._fault = matcher_fault(self.matcher)
        self._num_accepted += 1
        self.ended = self._fault is None and bool(self.matcher.is_stopped())

    @property
    def over(self) -> bool:
        """Whether the output has ended or failed, so that a token sampled meanwhile is no part of it."""
        return self.ended or self._fault is not None

    def fail(self, fault: str) -> None:
        """Makes the request end by error."""
        self._fault = fault

    def check(self) -> None:
        """Raises RequestFailedError if the grammar cannot be followed any further."""
        if self._fault is not None:
            raise RequestFailedError(f"structured_outputs could not be followed: {self._fault}")


@dataclass(slots=True)
class GrammarTimes:
    """Sums over iterations, for reports: seconds of masks, of following tokens, and tokens sampled under a mask."""

    mask_s: float = 0.0
    accept_s: float = 0.0
    masked_tokens: int = 0


class GrammarStates:
    """Compiles grammars, and holds the states of the live requests that have one.

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

    def add(self, request: Request) -> GrammarState | None:
        """The state of a request that begins; None without a grammar."""
        if request.grammar is None:
            return None
        assert isinstance(request.grammar, CompiledGrammar), request.request_id
        state = GrammarState(request.grammar, request, self.compiler.num_known, self._vocab_size)
        self._live[request.request_id] = state
        return state

    def drop(self, request_id: str) -> None:
        """Forgets a request that ended."""
        self._live.pop(request_id, None)

    def rows(self, plan: StepPlan, bucket: Bucket) -> Rows:
        """The rows of a plan that sample under a grammar."""
        live = self._live
        if not live:
            return ()
        found = [(row, live[name]) for row, name in enumerate(plan.decode.request_ids) if name in live]
        for row, chunk in enumerate(plan.prefill, bucket.decode_rows):
            if chunk.emits and chunk.request_id in live:
                found.append((row, live[chunk.request_id]))
        return found

    def masks(self, rows: Rows, bucket: Bucket) -> NDArray[np.uint32]:
        """uint32[N, ceil(V / 32)]: what `rows` may sample; other rows hold anything."""
        began = time.perf_counter()
        # A step's own: the device may still read those of the steps in flight.
        masks = np.zeros((bucket.sample_rows, self.compiler.mask_words), np.uint32)
        try:
            self.compiler.fill_masks([(state.matcher, row) for row, state in rows], masks)
        except Exception:
            # Half a step is on the device, and other requests have their part in it.
            logging.exception("no masks for %d requests, which fail", len(rows))
            for row, state in rows:
                state.fail("an internal error; the server's log has its cause")
                masks[row] = 0xFFFFFFFF
            return masks
        for row, state in rows:
            state.restrict(masks[row])
        self.times.masked_tokens += len(rows)
        self.times.mask_s += time.perf_counter() - began
        return masks

    def accept(self, rows: Rows, result: StepResult, bucket: Bucket) -> None:
        """Moves the states of `rows` on by the tokens that were sampled."""
        began = time.perf_counter()
        decode = bucket.decode_rows
        tokens = [
            (state, result.decode_tokens[row] if row < decode else result.prefill_tokens[row - decode])
            for row, state in rows
        ]
        self.compiler.accept([(state.matcher, token) for state, token in tokens if not state.over])
        for state, _ in tokens:
            state.advance()
        self.times.accept_s += time.perf_counter() - began


def _packed(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.uint32]:
    """uint32[ceil(V / 32)] with the bits of `token_ids`."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[np.asarray(token_ids, np.int64)] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)

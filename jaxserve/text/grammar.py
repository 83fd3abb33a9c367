"""Grammars: from a client's constraint to the set of tokens that may come next.

    compiler = GrammarCompiler(tokenizer, vocab_size=V, eos_token_ids=ids)
    grammar = compiler.compile(StructuredOutputs(regex="[a-z]+"))      any thread; ValueError says what is wrong
    matcher = grammar.start()                                         one output's state
    compiler.fill_masks([(matcher, 0)], masks)                        which tokens may come
    compiler.accept([(matcher, token_id)])                            one came

The work is llguidance's. It reads the tokenizer by itself; that its idea of every token's bytes is that of the
detokenizer is checked once, so what a grammar allows is what a client reads.

A hostile grammar is held by limits on its size, on the time and stack of its compilation (`grammar_trial`), and on the
work of each step; one that breaks the last ends its own request.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.core import StructuredOutputs
from jaxserve.faults import failpoint
from jaxserve.text.grammar_trial import trial_limits
from jaxserve.text.tokenizer import Tokenizer

TRIAL_BYTES = 4096
"""Grammars up to this size are compiled at once: nothing so small takes long or much stack."""
TRIAL_S = 5.0
NUM_KEPT = 64
"""Compiled grammars kept for later requests with the same constraint."""
_TRIAL = Path(__file__).with_name("grammar_trial.py")
_MAX_MESSAGE_CHARS = 500


class CompiledGrammar:
    """A constraint that can be followed; immutable."""

    def __init__(self, prototype: Any) -> None:
        self._prototype = prototype

    def start(self) -> Any:
        """A matcher at the beginning of an output."""
        return self._prototype.deep_copy()


class GrammarCompiler:
    """Compiles constraints for one model; thread-safe.

    Args:
      tokenizer: the model's.
      vocab_size: the model's, V; ids that the tokenizer lacks are never allowed.
      eos_token_ids: ids that end an output, allowed where a grammar may end.
      max_bytes: longest text of a constraint.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int], max_bytes: int = 1 << 17
    ) -> None:
        self.eos_token_ids = tuple(i for i in eos_token_ids if i < tokenizer.vocab_size)
        self.num_known = min(tokenizer.vocab_size, vocab_size)
        """Ids below this may stand in an output."""
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutputs, CompiledGrammar] = OrderedDict()
        self._padded_size = max(tokenizer.vocab_size, vocab_size)
        self._words = -(-vocab_size // 32)
        self._vocabulary: Any = None
        self._fault = ""
        self._executor: Any = None

    def prepare(self) -> None:
        """Reads the tokenizer; the first `compile` does it otherwise. Takes 0.4 s for 49k tokens."""
        with self._lock:
            if self._vocabulary is None and not self._fault:
                self._read_vocabulary()

    def compile(self, wanted: StructuredOutputs) -> CompiledGrammar:
        """The grammar of a constraint; may take seconds for a large one.

        Raises:
          ValueError: naming the field and what is wrong with it.
        """
        size = wanted.size
        if size > self._max_bytes:
            raise ValueError(
                f"structured_outputs.{wanted.constraint} has {size} bytes; the limit is {self._max_bytes}"
                " (max_grammar_bytes)"
            )
        with self._lock:
            kept = self._kept.get(wanted)
            if kept is not None:
                self._kept.move_to_end(wanted)
                return kept
        failpoint("grammar.compile")
        self.prepare()
        if self._fault:
            raise ValueError(f"structured_outputs is not available: {self._fault}")
        grammar = self._compile(wanted)
        with self._lock:
            self._kept[wanted] = grammar
            if len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def fill_masks(self, matchers: Sequence[tuple[Any, int]], masks: NDArray[np.uint32]) -> None:
        """Writes which tokens may come next.

        A matcher that fails gives some mask and is in error from then on.

        Args:
          matchers: each with its row of `masks`.
          masks: uint32[N, ceil(V / 32)], contiguous; token i is bit i % 32 of word i // 32. Other rows are left alone.
        """
        rows, words = masks.shape
        padded_words = -(-self._padded_size // 32)
        target = masks if words == padded_words else np.empty((rows, padded_words), np.uint32)
        self._threads().unsafe_compute_mask_ptr(list(matchers), target.ctypes.data, 4 * padded_words, rows)
        if target is not masks:
            for _, row in matchers:
                masks[row] = target[row, :words]

    def first_mask(self, grammar: CompiledGrammar) -> NDArray[np.uint32]:
        """uint32[ceil(V / 32)]: which tokens an output may begin with."""
        mask = np.frombuffer(grammar.start().compute_bitmask(), np.uint32)
        return mask[: self._words].copy()

    def accept(self, tokens: Sequence[tuple[Any, int]]) -> None:
        """Moves matchers on by a token each; one that does not allow its token is in error from then on."""
        if tokens:
            self._threads().consume_token_par(list(tokens))

    @property
    def mask_words(self) -> int:
        """32-bit words of a mask, ceil(V / 32)."""
        return self._words

    def _compile(self, wanted: StructuredOutputs) -> CompiledGrammar:
        from llguidance import LLMatcher

        from jaxserve.text.grammar_source import grammar_source

        try:
            source = grammar_source(wanted)
        except ValueError as error:
            message = str(error)
            raise ValueError(message if message.startswith("structured_outputs") else _wrong(wanted, message)) from None
        if len(source) > TRIAL_BYTES:
            _try(source, wanted)
        prototype = LLMatcher(self._vocabulary, source, log_level=0, limits=trial_limits())
        if not prototype.is_error():
            # The first mask is the costliest: every output starts with a copy of what it made.
            prototype.compute_bitmask()
        if prototype.is_error():
            raise ValueError(_wrong(wanted, prototype.get_error()))
        return CompiledGrammar(prototype)

    def _threads(self) -> Any:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        return self._executor

    def _read_vocabulary(self) -> None:
        from llguidance import LLTokenizer

        if not self.eos_token_ids:
            self._fault = "the model has no EOS id, which ends an output"
            return
        try:
            vocabulary = LLTokenizer(
                self._tokenizer.to_json(), n_vocab=self._padded_size, eos_token=list(self.eos_token_ids)
            )
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the Rust library is no Exception
            self._fault = f"llguidance cannot read the tokenizer ({_first_line(str(error))})"
            return
        for token_id in range(self.num_known):
            data = self._tokenizer.token_bytes(token_id)
            # No text holds the byte 0xFF; llguidance marks special tokens with it.
            if token_id not in self._tokenizer.special_ids and data[:1] != b"\xff":
                other = vocabulary.decode_bytes([token_id])
                if other != data and not vocabulary.is_special_token(token_id):
                    self._fault = f"token {token_id} is {data!r} for the detokenizer and {other!r} for llguidance"
                    return
        self._vocabulary = vocabulary


def _try(source: str, wanted: StructuredOutputs) -> None:
    """Raises ValueError unless a process of its own survives the compilation, in time."""
    command = [sys.executable, "-P", str(_TRIAL)]
    try:
        done = subprocess.run(command, input=source.encode(), capture_output=True, timeout=TRIAL_S, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(_wrong(wanted, f"it is too complex: compiling it takes over {TRIAL_S:g} s")) from None
    if done.returncode != 0:
        raise ValueError(_wrong(wanted, "it is too complex: its rules are nested too deeply or need too much memory"))
    if done.stdout:
        raise ValueError(_wrong(wanted, done.stdout.decode("utf-8", "replace")))


def _wrong(wanted: StructuredOutputs, message: str) -> str:
    return f"structured_outputs.{wanted.constraint} cannot be followed: {_shortened(message)}"


def _shortened(message: str) -> str:
    """llguidance's message without its quotation of a whole grammar."""
    text = message.replace("<non-verbose/>", "").strip()
    if text.startswith("panic:"):
        text = text.split("\n", 1)[0]
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[: _MAX_MESSAGE_CHARS - 3] + "..."


def _first_line(message: str) -> str:
    return message.split("\n", 1)[0][:200]


def is_internal(fault: str) -> bool:
    """Whether a matcher's fault is none of its grammar's: a panic, or a token that it had not allowed."""
    return "panic" in fault or "doesn't satisfy the grammar" in fault


def matcher_fault(matcher: Any) -> str | None:
    """Why a matcher is in error; None while it is not."""
    return _first_line(matcher.get_error()) or "unknown" if matcher.is_error() else None

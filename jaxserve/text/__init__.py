"""Text in and out: tokenizer, chat template, incremental detokenizer, stop strings, tool calls. No jax."""

from jaxserve.text.chat_template import ChatTemplateError
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.grammar import CompiledGrammar, GrammarCompiler, is_internal, matcher_fault
from jaxserve.text.load import load_tokenizer
from jaxserve.text.stop_checker import StopChecker
from jaxserve.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplateError",
    "CompiledGrammar",
    "GrammarCompiler",
    "IncrementalDetokenizer",
    "StopChecker",
    "Tokenizer",
    "is_internal",
    "load_tokenizer",
    "matcher_fault",
]

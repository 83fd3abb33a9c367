"""Text in and out: tokenizer, chat template, incremental detokenizer, stop strings, tool calls. No jax."""

from jaxserve.text.chat_template import ChatTemplateError
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.load import load_tokenizer
from jaxserve.text.stop_checker import StopChecker
from jaxserve.text.tokenizer import Tokenizer

__all__ = ["ChatTemplateError", "IncrementalDetokenizer", "StopChecker", "Tokenizer", "load_tokenizer"]

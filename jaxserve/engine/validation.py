"""Checks a request against the model, and turns it into the scheduler's `Request`s.

`SamplingParams` has checked what it can alone; here are the rules that need the vocabulary and the
context length. Every message names field, rule and value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from absl import logging

from jaxserve.config import ServiceClass
from jaxserve.core import NO_TERMS, Adapter, Priority, Request, SamplingParams, Submission, Terms, choice_seed
from jaxserve.models import ModelConfig
from jaxserve.tables.layout import MAX_STOP_IDS
from jaxserve.text import Tokenizer

_NO_CLASS = ServiceClass("none")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request is checked against.

    Attributes:
      vocab_size: ids are 0 .. vocab_size - 1.
      max_model_len: most prompt and output tokens together.
      eos_token_ids: ids that end an output.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


def context_length(limit: int, asked: int | None) -> int:
    """The context length that was asked for; the model's limit when None.

    Raises:
      ValueError: the model's limit is less.
    """
    if asked is None:
        return limit
    if asked > limit:
        raise ValueError(f"max_model_len is {asked}; the model's limit is {limit} (max_position_embeddings)")
    return asked


def eos_token_ids(config: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Of the model's configuration and the tokenizer; a tokenizer may know ids that the model lacks."""
    ids = {*config.eos_token_ids, *(tokenizer.eos_ids if tokenizer else ())}
    unknown = sorted(i for i in ids if not 0 <= i < config.vocab_size)
    if unknown:
        logging.warning("EOS ids %s are outside the model's vocabulary and never end an output", unknown)
    return tuple(sorted(ids.difference(unknown)))


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError unless all are integers of the vocabulary."""
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ValueError(f"{name} must be integers; got {token_id!r}")
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"{name} has id {token_id}; the vocabulary's ids are 0 to {vocab_size - 1}")


def bad_word_ids(words: Sequence[str], tokenize: Callable[[str], list[int]]) -> tuple[tuple[int, ...], ...]:
    """The ids of each of `words`, as in vLLM alone and after a space.

    The form after a space is left out where it begins alike or is not as many tokens.

    Raises:
      ValueError: a word has no tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        stripped = word.lstrip()
        alone, spaced = tuple(tokenize(stripped)), tuple(tokenize(" " + stripped))
        if not alone:
            raise ValueError(f"bad_words has {word[:50]!r}, which the tokenizer gives no token")
        found[alone] = None
        if len(spaced) == len(alone) and spaced[0] != alone[0]:
            found[spaced] = None
    return tuple(found)


def make_requests(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    limits: ModelLimits,
    *,
    request_id: str,
    terms: Terms = NO_TERMS,
    bad_words: Sequence[tuple[int, ...]] = (),
    now: float = 0.0,
    service_classes: Sequence[ServiceClass] = (),
    draw_seed: Callable[[], int],
    grammar: object | None = None,
    adapter: Adapter | None = None,
) -> list[Request]:
    """`params.n` requests for one prompt; a lone one keeps `request_id`, others get `request_id#i`.

    The first alone asks for `params.prompt_logprobs`.

    Args:
      terms: what is asked of the scheduler; a service class fills in what they leave open.
      bad_words: ids of each of `params.bad_words`.
      now: instant its deadline counts from.
      service_classes: those configured.
      draw_seed: gives 64 bits for a request without a seed.
      grammar: compiled form of `params.structured_outputs`.
      adapter: the LoRA adapter it is for.

    Raises:
      ValueError: the prompt is empty or too long, an id is not in the vocabulary, prompt and
        `max_tokens` exceed the context together, no token may be sampled, a class is not configured, or
        `priority` is out of range.
    """
    if not prompt_token_ids:
        raise ValueError("prompt has no tokens; it must have at least 1")
    length = len(prompt_token_ids)
    max_tokens = _granted_tokens(length, params.max_tokens, limits.max_model_len)
    if params.min_tokens > max_tokens:
        raise ValueError(f"min_tokens is {params.min_tokens}; only {max_tokens} output tokens fit")
    check_token_ids("prompt", prompt_token_ids, limits.vocab_size)
    check_token_ids("logit_bias", list(params.logit_bias), limits.vocab_size)
    check_token_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    check_token_ids("bad_words", [token_id for word in bad_words for token_id in word], limits.vocab_size)
    bad_token_ids = tuple(word[0] for word in bad_words if len(word) == 1)
    _check_choice(params, bad_token_ids, limits, bound=grammar is not None)
    service_class = _service_class(terms.service_class, service_classes)
    priority = service_class.priority if terms.priority is None else terms.priority
    deadline_s = service_class.deadline_s if terms.deadline_s is None else terms.deadline_s
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ValueError(f"priority must be an integer; got {priority!r}")
    if not Priority.MIN <= priority <= Priority.MAX:
        raise ValueError(f"priority is {priority}; it must be in [{Priority.MIN}, {Priority.MAX}]")
    free_running = grammar is None and _is_free_running(params, bad_words, limits)
    seed = params.seed if params.seed is not None else draw_seed()
    # The prompt of all choices is one, and so are its scores.
    others = params if params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
    return [
        Request(
            request_id=request_id if params.n == 1 else f"{request_id}#{index}",
            prompt_token_ids=tuple(prompt_token_ids),
            params=params if index == 0 else others,
            eos_token_ids=limits.eos_token_ids,
            max_tokens=max_tokens,
            seed=choice_seed(seed, index),
            priority=priority,
            deadline_at=None if deadline_s is None else now + deadline_s,
            tenant=terms.tenant,
            service_class=terms.service_class,
            cache_salt=terms.cache_salt,
            adapter=adapter.number if adapter else 0,
            adapter_place=adapter.place if adapter else 0,
            bad_token_ids=bad_token_ids,
            bad_sequences=tuple(word for word in bad_words if len(word) > 1),
            grammar=grammar,
            free_running=free_running,
            operation=terms.operation,
            traceparent=terms.traceparent,
        )
        for index in range(params.n)
    ]


def _is_free_running(params: SamplingParams, bad_words: Sequence[tuple[int, ...]], limits: ModelLimits) -> bool:
    """Whether the device alone finds the end of an output and all that bears on its tokens, but for a grammar.

    It does not find stop strings, nor more stop ids than it has room for; it bars words of one token only, and keeps
    no log-probabilities from one step to the next.
    """
    eos = () if params.ignore_eos else limits.eos_token_ids
    if params.stop or params.logprobs is not None or any(len(word) > 1 for word in bad_words):
        return False
    return len({*eos, *params.stop_token_ids}) <= MAX_STOP_IDS


def _check_choice(params: SamplingParams, bad: Sequence[int], limits: ModelLimits, bound: bool) -> None:
    """Raises ValueError unless the allowed ids are in the vocabulary and one of them can be sampled at every step.

    Args:
      bad: ids of the words that are one token.
      bound: by a grammar, before whose end `min_tokens` holds off EOS alone, and only while something else is left.
    """
    allowed = params.allowed_token_ids
    if allowed is not None and not (min(allowed) >= 0 and max(allowed) < limits.vocab_size):
        check_token_ids("allowed_token_ids", allowed, limits.vocab_size)
    barred = set(bad)
    if not _num_left(allowed, barred, limits.vocab_size):
        raise ValueError(f"bad_words holds off every token{_of(allowed)}; nothing could be sampled")
    if params.min_tokens > 0 and not bound:
        barred.update(() if params.ignore_eos else limits.eos_token_ids, params.stop_token_ids)
        if not _num_left(allowed, barred, limits.vocab_size):
            raise ValueError(
                f"min_tokens is {params.min_tokens}, which holds off EOS and stop ids; no other token{_of(allowed)}"
                f" is left{' by bad_words' if bad else ''}"
            )


def _num_left(allowed: Sequence[int] | None, barred: set[int], vocab_size: int) -> int:
    """Tokens that may be sampled; every id of `barred` is in the vocabulary."""
    return vocab_size - len(barred) if allowed is None else len(set(allowed) - barred)


def _of(allowed: Sequence[int] | None) -> str:
    return "" if allowed is None else " of allowed_token_ids"


def _service_class(name: str, configured: Sequence[ServiceClass]) -> ServiceClass:
    """The class of that name; "" is one without limits and defaults."""
    if not name:
        return _NO_CLASS
    for service_class in configured:
        if service_class.name == name:
            return service_class
    names = ", ".join(each.name for each in configured) or "none is configured (service_classes)"
    raise ValueError(f"service_class is {name[:50]!r}; it must be one of: {names}")


def _granted_tokens(length: int, max_tokens: int | None, max_model_len: int) -> int:
    if length > max_model_len or (length == max_model_len and max_tokens != 0):
        raise ValueError(f"prompt has {length} tokens; the limit is {max_model_len} (max_model_len), output included")
    if max_tokens is None:
        return max_model_len - length
    if length + max_tokens > max_model_len:
        raise ValueError(
            f"prompt has {length} tokens and max_tokens is {max_tokens}; together they must be at most"
            f" {max_model_len} (max_model_len)"
        )
    return max_tokens


def check_num_choices(submissions: Sequence[Submission], limit: int) -> None:
    """Raises ValueError when the choices of all prompts could never be live at once; `limit` of them can."""
    asked = sum(submission.params.n for submission in submissions)
    if asked <= limit:
        return
    made_of = "max_num_seqs + max_queue_requests"
    if len(submissions) == 1:
        raise ValueError(f"n is {asked}; at most {limit} choices can run and wait at once ({made_of})")
    raise ValueError(
        f"prompt: {len(submissions)} prompts ask for {asked} choices in all; the limit is {limit}"
        f" ({made_of}): send fewer per request"
    )

"""What is said when a server cannot start, and which flags change it."""

from __future__ import annotations

_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory")
_REMEDY = (
    "lower --memory_fraction or --num_pages (KV pages), --max_num_batched_tokens, --max_num_seqs or --max_model_len"
    " (workspace); --dtype=bfloat16 or a higher --tensor_parallel_size makes weights smaller on each device;"
    " --dry_run prints the memory plan"
)


def start_error(error: BaseException) -> str:
    """One line: what went wrong and, where memory did, what to change."""
    text = str(error) or type(error).__name__
    if isinstance(error, MemoryError) or any(words in text for words in _OUT_OF_MEMORY):
        first = text.splitlines()[0][:300]
        return f"the engine did not start: out of memory ({first}); {_REMEDY}"
    return f"the engine did not start: {text}"

"""Plain values shared by every layer: requests, sampling settings, errors. Standard library only."""

from jaxserve.core.adapter import Adapter
from jaxserve.core.errors import (
    REJECTION_REASONS,
    AdapterNotFoundError,
    CheckpointError,
    CutShortError,
    EngineDeadError,
    EngineStuckError,
    HostLostError,
    JaxserveError,
    MissingBucketError,
    NotReadyError,
    RejectedError,
    Rejection,
    RequestFailedError,
    UnfollowableError,
    UnsupportedModelError,
)
from jaxserve.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxserve.core.process_memory import peak_memory_bytes
from jaxserve.core.queued_output import queue_output, write_last
from jaxserve.core.request import MAX_TRACEPARENT, NO_TERMS, FinishReason, Priority, Request, Submission, Terms
from jaxserve.core.sampling_params import MAX_LOGPROBS, SamplingParams, choice_seed
from jaxserve.core.structured_outputs import StructuredOutputs
from jaxserve.core.views import (
    ChunkView,
    EngineTotals,
    EngineView,
    EventView,
    IterationView,
    Recording,
    RequestRecord,
    SlotView,
    WaitingView,
)
from jaxserve.core.whole_lines import write_whole

__all__ = [
    "MAX_LOGPROBS",
    "MAX_TRACEPARENT",
    "NO_TERMS",
    "REJECTION_REASONS",
    "Adapter",
    "AdapterNotFoundError",
    "CheckpointError",
    "ChunkView",
    "CompletionOutput",
    "CutShortError",
    "EngineDeadError",
    "EngineStuckError",
    "EngineTotals",
    "EngineView",
    "EventView",
    "FinishReason",
    "HostLostError",
    "IterationView",
    "JaxserveError",
    "Logprob",
    "MissingBucketError",
    "NotReadyError",
    "Priority",
    "Recording",
    "RejectedError",
    "Rejection",
    "Request",
    "RequestFailedError",
    "RequestMetrics",
    "RequestOutput",
    "RequestRecord",
    "SamplingParams",
    "SlotView",
    "StructuredOutputs",
    "Submission",
    "Terms",
    "UnfollowableError",
    "UnsupportedModelError",
    "WaitingView",
    "choice_seed",
    "peak_memory_bytes",
    "queue_output",
    "write_last",
    "write_whole",
]

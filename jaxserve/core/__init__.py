"""Plain values shared by every layer: requests, sampling settings, errors. Standard library only."""

from jaxserve.core.errors import (
    REJECTION_REASONS,
    CheckpointError,
    EngineDeadError,
    JaxserveError,
    MissingBucketError,
    NotReadyError,
    RejectedError,
    Rejection,
    RequestFailedError,
    UnsupportedModelError,
)
from jaxserve.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxserve.core.request import NO_TERMS, FinishReason, Priority, Request, Submission, Terms
from jaxserve.core.sampling_params import MAX_LOGPROBS, SamplingParams, choice_seed
from jaxserve.core.structured_outputs import StructuredOutputs

__all__ = [
    "MAX_LOGPROBS",
    "NO_TERMS",
    "REJECTION_REASONS",
    "CheckpointError",
    "CompletionOutput",
    "EngineDeadError",
    "FinishReason",
    "JaxserveError",
    "Logprob",
    "MissingBucketError",
    "NotReadyError",
    "Priority",
    "RejectedError",
    "Rejection",
    "Request",
    "RequestFailedError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "Submission",
    "Terms",
    "UnsupportedModelError",
    "choice_seed",
]

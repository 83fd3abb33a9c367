"""Engines: the loop over scheduler and runner, offline and asynchronous."""

from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.engine import Engine
from jaxserve.engine.llm import LLM
from jaxserve.engine.metrics import EngineLoad
from jaxserve.engine.output_processor import OutputDelta
from jaxserve.engine.stream import RequestStream

__all__ = ["LLM", "AsyncEngine", "Engine", "EngineLoad", "OutputDelta", "RequestStream"]

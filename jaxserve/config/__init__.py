"""Settings as frozen dataclasses; `flags` (absl) is imported only by command-line programs."""

from jaxserve.config.engine_config import EngineConfig, SchedulerConfig
from jaxserve.config.service_class import ServiceClass

__all__ = ["EngineConfig", "SchedulerConfig", "ServiceClass"]

"""Settings as frozen dataclasses; `flags` (absl) is imported only by command-line programs."""

from jaxserve.config.engine_config import EngineConfig, SchedulerConfig

__all__ = ["EngineConfig", "SchedulerConfig"]

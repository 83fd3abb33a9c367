"""What the server's process holds: memory, threads, open files, tasks of the event loop; faults on purpose."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.faults import faults_injected

LABELS = ("model_name", "engine")


class ProcessCollector(Collector):
    """Figures of this process, read when they are asked for; collect on the event loop whose tasks are meant.

    Memory and open files are those of /proc, and left out where there is none; faults are there with a fault plan.

    Args:
      model_name: the `model_name` label.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        """The metrics."""
        yield self._gauge("process_threads", "Threads of Python in the process.", threading.active_count())
        yield self._gauge("asyncio_tasks", "Tasks of the server's event loop.", len(asyncio.all_tasks()))
        if (struck := faults_injected()) is not None:
            family = CounterMetricFamily(
                "jaxserve:faults_injected", "Faults of the fault plan.", labels=(*LABELS, "at", "do")
            )
            for place, count in struck.items():
                family.add_metric([self._model_name, "0", *place], count)
            yield family
        proc = Path("/proc/self")
        try:
            pages = int((proc / "statm").read_text().split()[1])
            # The listing itself is one of them.
            num_files = len(os.listdir(proc / "fd")) - 1
        except OSError:
            return
        resident = pages * os.sysconf("SC_PAGE_SIZE")
        yield self._gauge("process_resident_memory_bytes", "Memory of the process that is in RAM.", resident)
        yield self._gauge("process_open_fds", "Open files and connections of the process.", num_files)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"jaxserve:{name}", text, labels=LABELS)
        family.add_metric([self._model_name, "0"], value)
        return family

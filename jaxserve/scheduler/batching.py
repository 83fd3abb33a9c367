"""Batching: when free slots may be filled.

| name              | slots are filled                                                       |
|-------------------|------------------------------------------------------------------------|
| `continuous`      | whenever one is free                                                   |
| `static`          | when the whole batch before has ended                                  |
| `request_dynamic` | likewise, and only with a full batch or after `batch_timeout_s`         |

The latter two are how models were served before iteration-level scheduling (Yu et al., "Orca", OSDI
2022). They are here to be compared with.
"""

from __future__ import annotations

from jaxserve.config import SchedulerConfig


class Batching:
    """Answers one question; the arguments describe the moment.

    Args:
      config: `batching`, `batch_timeout_s` and the number of slots.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.refills = config.batching == "continuous"
        self._waits = config.batching == "request_dynamic"
        self._size = config.max_num_seqs
        self._timeout_s = config.batch_timeout_s

    def may_fill(self, num_busy: int, num_waiting: int, waited_s: float) -> bool:
        """Whether slots may be filled now.

        Args:
          num_busy: requests of the batch before that have not ended.
          num_waiting: requests in the queue.
          waited_s: by the front of the queue.
        """
        if self.refills:
            return True
        if num_busy:
            return False
        return not self._waits or num_waiting >= self._size or waited_s >= self._timeout_s

"""PolicyConfig: which policies a scheduler follows and what they are told; see `docs/scheduling.md`.

`SchedulerConfig` and `EngineConfig` both are one, so every policy setting exists once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from jaxserve.config.checks import at_least, not_negative, one_of, positive
from jaxserve.config.service_class import ServiceClass

POLICIES = ("fcfs", "priority", "sjf", "edf", "fair")
RESERVATIONS = ("guaranteed", "exact", "expected", "optimistic")
PREEMPTIONS = ("pause", "swap", "recompute", "auto")
SWAPPING_PREEMPTIONS = ("swap", "auto")
"""Those that copy pages to the host pool."""
VICTIMS = ("most_remaining", "least_computed")
BATCHINGS = ("continuous", "static", "request_dynamic")
GROWING_RESERVATIONS = ("expected", "optimistic")
"""Those that set aside less than a request may come to need, so that pages can run out under it."""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Named policies and their settings.

    Attributes:
      policy: order of the waiting queue.
      priority_aging_s: seconds of waiting that outweigh one point of priority (policy "priority").
      sjf_aging_tokens_per_s: tokens of work that one second of waiting outweighs (policy "sjf").
      edf_default_s: deadline after arrival of a request without one (policy "edf").
      fair_input_weight, fair_output_weight: service counted per prompt and output token (policy "fair").
      reservation: pages a request must find to be admitted.
      expected_quantile: of the observed output lengths (reservation "expected").
      preemption: what a preempted request gives up: its slot alone ("pause"), its pages too, which are
        copied to the host ("swap") or computed again ("recompute"), or the cheaper of these two ("auto").
      victim: whom of the lowest class a preemption hits.
      max_preemptions: a request preempted so often is not preempted again.
      priority_preemption: a higher-priority arrival without a free slot may preempt a lower one.
      queue_displacement: an arrival that finds the queue full may displace a queued request of lower class.
      long_prefill_token_threshold: a prompt with more tokens left than this is long; 0: none is.
      max_long_prefills: most long prompts with a chunk in one iteration.
      itl_target_s: seconds an iteration with decode rows should take at most: prompts get what the
        predicted step time leaves; None: they get the whole token budget. Where requests of a service
        class with a smaller target decode, that one holds.
      max_decode_steps: most decode steps of one iteration: several where no prompt is left, nobody waits but
        for a slot, and no row needs the host between two tokens; 1: never several.
      max_arrival_delay_s: seconds that a request which arrives just after such iterations were dispatched may lose,
        by the step time of late, to their further steps.
      batching: "continuous"; or the older schemes, for comparison: "static" keeps a batch until its
        longest ends, "request_dynamic" also waits for a full batch or `batch_timeout_s`.
      batch_timeout_s: longest a request waits for its batch to fill.
      enable_prefix_caching: full pages of ended requests are kept and shared by equal beginnings.
      service_classes: classes a request may name.
    """

    policy: str = "fcfs"
    priority_aging_s: float = 5.0
    sjf_aging_tokens_per_s: float = 100.0
    edf_default_s: float = 60.0
    fair_input_weight: float = 1.0
    fair_output_weight: float = 2.0
    reservation: str = "guaranteed"
    expected_quantile: float = 0.9
    preemption: str = "pause"
    victim: str = "most_remaining"
    max_preemptions: int = 3
    priority_preemption: bool = False
    queue_displacement: bool = False
    long_prefill_token_threshold: int = 0
    max_long_prefills: int = 1
    itl_target_s: float | None = None
    max_decode_steps: int = 1
    max_arrival_delay_s: float = 0.05
    batching: str = "continuous"
    batch_timeout_s: float = 0.1
    enable_prefix_caching: bool = False
    service_classes: tuple[ServiceClass, ...] = ()

    def check_policies(self) -> None:
        """Raises ValueError for a setting that breaks its rule."""
        one_of("policy", self.policy, POLICIES)
        one_of("reservation", self.reservation, RESERVATIONS)
        one_of("preemption", self.preemption, PREEMPTIONS)
        one_of("victim", self.victim, VICTIMS)
        one_of("batching", self.batching, BATCHINGS)
        for name in (
            "priority_aging_s",
            "sjf_aging_tokens_per_s",
            "edf_default_s",
            "fair_input_weight",
            "fair_output_weight",
            "batch_timeout_s",
        ):
            positive(name, getattr(self, name))
        if self.itl_target_s is not None:
            positive("itl_target_s", self.itl_target_s)
        at_least("max_decode_steps", self.max_decode_steps, 1)
        not_negative("max_arrival_delay_s", self.max_arrival_delay_s)
        at_least("max_preemptions", self.max_preemptions, 1)
        at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        at_least("max_long_prefills", self.max_long_prefills, 1)
        if not 0.0 < self.expected_quantile <= 1.0:
            raise ValueError(f"expected_quantile is {self.expected_quantile}; it must be in (0, 1]")
        if self.reservation in GROWING_RESERVATIONS and self.preemption == "pause":
            raise ValueError(
                f"reservation is {self.reservation!r} and preemption is 'pause'; a paused request keeps its pages,"
                " so a running one that lacks a page could never get it: set preemption to swap, recompute or auto"
            )
        names = [each.name for each in self.service_classes]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"service_classes has {name!r} twice; each name may be there once")


POLICY_FIELDS = tuple(field.name for field in fields(PolicyConfig))

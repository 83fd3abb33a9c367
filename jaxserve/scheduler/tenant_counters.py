"""TenantCounters: how much service each tenant has had."""

from __future__ import annotations

from collections.abc import Mapping


class TenantCounters:
    """Weighted tokens per tenant, comparable between tenants that are live.

    A tenant that comes back after a pause is lifted to `floor`, the counter of the tenant served last:
    it cannot save up its absence, and one that never stayed away loses nothing. A counter at or below
    the floor says nothing more about an absent tenant and is forgotten.

    Args:
      input_weight, output_weight: of a prompt token, of an output token.
    """

    _SLACK = 1024

    def __init__(self, input_weight: float, output_weight: float) -> None:
        self._input_weight, self._output_weight = input_weight, output_weight
        self._service: dict[str, float] = {}
        self._num_live: dict[str, int] = {}
        self.floor = 0.0

    def __len__(self) -> int:
        return len(self._service)

    def __getitem__(self, tenant: str) -> float:
        return self._service.get(tenant, self.floor)

    def enter(self, tenant: str) -> None:
        """A request of the tenant became live."""
        if tenant not in self._num_live:
            self._num_live[tenant] = 0
            self._service[tenant] = max(self._service.get(tenant, self.floor), self.floor)
        self._num_live[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A request of the tenant is no longer live."""
        self._num_live[tenant] -= 1
        if self._num_live[tenant]:
            return
        del self._num_live[tenant]
        if self._service[tenant] <= self.floor:
            del self._service[tenant]
        elif len(self._service) > 2 * len(self._num_live) + self._SLACK:
            kept = {t: s for t, s in self._service.items() if t in self._num_live or s > self.floor}
            self._service = kept

    def serve(self, tenant: str) -> None:
        """A request of the tenant was promoted: it had least service of those that wait."""
        self.floor = max(self.floor, self[tenant])

    def charge_outputs(self, num_by_tenant: Mapping[str, int]) -> None:
        """So many tokens of decode rows of live requests of each tenant are in a plan."""
        weight = self._output_weight
        for tenant, count in num_by_tenant.items():
            service = self._service[tenant]
            # Added one by one, so that the sum does not depend on how many are charged at once.
            for _ in range(count):
                service += weight
            self._service[tenant] = service

    def charge_chunk(self, tenant: str, num_tokens: int, emits: bool) -> None:
        """A chunk of `num_tokens` of a live request is in a plan; `emits`: it samples a token too."""
        self._service[tenant] += self._input_weight * num_tokens + self._output_weight * emits

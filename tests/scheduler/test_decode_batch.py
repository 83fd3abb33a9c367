"""DecodeBatch: its columns follow joins and leaves, in promotion order."""

from __future__ import annotations

import random

from jaxserve.scheduler.decode_batch import DecodeBatch
from jaxserve.scheduler.sequence import Sequence
from tests.scheduler.harness import make_request


def test_columns_stay_in_promotion_order_whoever_joins_or_leaves() -> None:
    rng = random.Random(0)
    sequences = [
        Sequence(make_request(f"r{turn}", tenant=f"t{turn % 3}"), turn, 0.0, slot=100 - turn, turn=turn)
        for turn in range(20)
    ]
    batch, members = DecodeBatch(), set[int]()
    for _ in range(300):
        sequence = rng.choice(sequences)
        if sequence.turn in members:
            batch.leave(sequence)
        else:
            batch.leave(sequence)  # one that is not in changes nothing
            batch.join(sequence)
        members ^= {sequence.turn}
        expected = [other for other in sequences if other.turn in members]
        assert batch.sequences == expected and len(batch) == len(expected)
        assert batch.request_ids == [other.request_id for other in expected]
        assert batch.slots == [other.slot for other in expected]
        assert [batch.index(other) for other in expected] == list(range(len(expected)))
        tenants = [other.request.tenant for other in expected]
        assert batch.num_by_tenant == {tenant: tenants.count(tenant) for tenant in tenants}

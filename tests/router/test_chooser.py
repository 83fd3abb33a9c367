"""Which replica gets a request."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.routing import (
    ROUTING_POLICIES,
    ReplicaChooser,
    RouteRequest,
    RoutingSettings,
    keys_of_text,
    scope_root,
)

ROOT = scope_root("")


def asking(text="", *, model="", session="", num_tokens=1):
    return RouteRequest(keys_of_text(ROOT, text.encode()), num_tokens, model, session)


def chooser(num_replicas=2, **fields):
    made = ReplicaChooser(num_replicas, RoutingSettings(**fields))
    for replica in range(num_replicas):
        made.set_available(replica, True)
    return made


def send(of, request, *, end=True, excluded=()):
    choice = of.choose(request, excluded)
    of.begin(choice.replica, request)
    if end:
        of.end(choice.replica, request)
    return choice


def test_round_robin_goes_round_and_skips_who_is_away():
    of = chooser(3, policy="round_robin")
    assert [send(of, asking()).replica for _ in range(4)] == [0, 1, 2, 0]
    of.set_available(1, False)
    assert [send(of, asking()).replica for _ in range(3)] == [2, 0, 2]


def test_least_loaded_counts_requests_then_tokens_then_what_it_had_before():
    of = chooser(3, policy="least_loaded")
    assert [send(of, asking(num_tokens=tokens), end=False).replica for tokens in (500, 10, 500)] == [0, 1, 2]
    assert of.choose(asking()).replica == 1  # as many requests, fewer tokens
    of = chooser(3, policy="least_loaded")
    assert [send(of, asking()).replica for _ in range(4)] == [0, 1, 2, 0]


def test_requests_of_others_count_as_load():
    of = chooser(2, policy="least_loaded")
    send(of, asking(), end=False)
    of.report_load(0, 1)  # its own
    of.report_load(1, 5)
    assert of.load(0).from_others == 0 and of.load(1).from_others == 5
    assert of.choose(asking()).replica == 0


def test_a_prompt_goes_where_its_beginning_is():
    of = chooser(3)
    for text in ("a" * 640, "b" * 640, "c" * 640):
        send(of, asking(text))
    again = [send(of, asking(letter * 640 + "and more" * 8)) for letter in "bcab"]
    assert [(choice.replica, choice.reason, choice.num_matched) for choice in again[:3]] == [
        (1, "prefix", 10),
        (2, "prefix", 10),
        (0, "prefix", 10),
    ]
    assert again[3].num_matched == 11  # what came last is remembered too


def test_a_match_below_the_threshold_decides_nothing():
    of = chooser(2, cache_threshold=0.5)
    send(of, asking("a" * 64 + "b" * 640), end=False)
    choice = of.choose(asking("a" * 64 + "c" * 640))
    assert (choice.replica, choice.reason) == (1, "load")


def test_between_matches_that_differ_by_less_than_the_threshold_load_decides():
    of = chooser(2, cache_threshold=0.2)
    send(of, asking("a" * 1000), end=False)
    assert send(of, asking("a" * 1000), excluded={0}, end=False).replica == 1
    send(of, asking("a" * 1000 + "b" * 100), excluded={1}, end=False)
    assert of.choose(asking("a" * 1000 + "b" * 100)).replica == 1


def test_an_overloaded_replica_is_not_chosen_for_its_cache():
    of = chooser(2, balance_abs_threshold=2, balance_rel_threshold=1.0)
    request = asking("a" * 640)
    assert [send(of, request, end=False).replica for _ in range(4)] == [0, 0, 0, 1]


def test_the_relative_threshold_holds_at_high_load():
    of = chooser(2, balance_abs_threshold=1, balance_rel_threshold=2.0)
    of.report_load(1, 10)
    request = asking("a" * 640)
    assert [send(of, request, end=False).replica for _ in range(21)].count(0) == 21  # 20 is twice 10
    assert of.choose(request).replica == 1


def test_a_session_stays_until_its_replica_is_overloaded_or_away():
    of = chooser(2, balance_abs_threshold=1, balance_rel_threshold=1.0)
    assert send(of, asking(session="s"), end=False).replica == 0
    assert of.choose(asking(session="other")).replica == 1
    assert of.choose(asking(session="s")).reason == "session"
    send(of, asking(session="s"), end=False)
    assert of.choose(asking(session="s")).replica == 1
    of = chooser(3)
    send(of, asking(session="s"))
    of.set_available(0, False)
    assert of.choose(asking(session="s")).replica == 1


def test_a_request_goes_to_a_replica_that_serves_its_model():
    of = chooser(3)
    of.set_models(0, ["base"])
    of.set_models(2, ["base", "sql"])
    assert of.choose(asking(model="sql")).replica == 2
    assert of.choose(asking(model="sql"), excluded={2}).replica == 0  # its 404 says more
    assert of.choose(asking(model="unheard")).replica == 0


def test_a_half_open_replica_gets_one_request_at_a_time():
    of = chooser(2, policy="least_loaded")
    of.set_available(0, True, limit=1)
    assert [send(of, asking(), end=False).replica for _ in range(3)] == [0, 1, 1]


def test_limits_refuse_nobody():
    of = chooser(2)
    of.set_available(0, True, limit=1)
    of.set_available(1, False)
    assert [send(of, asking(), end=False).replica for _ in range(3)] == [0, 0, 0]


def test_a_replica_that_lost_its_cache_is_not_chosen_for_it():
    of = chooser(2)
    send(of, asking("a" * 640))
    of.forget(0)
    assert of.choose(asking("a" * 640)).replica == 1


def test_nobody_is_chosen_when_nobody_is_there():
    of = ReplicaChooser(2)
    assert of.choose(asking("a" * 640)) is None
    assert chooser(2).choose(asking(), excluded={0, 1}) is None


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("policy", "random", "routing_policy is 'random'; it must be one of cache_aware"),
        ("cache_threshold", 1.5, "cache_threshold is 1.5; it must be between 0 and 1"),
        ("balance_abs_threshold", -1, "balance_abs_threshold is -1; it must be 0 or more"),
        ("balance_rel_threshold", 0.5, "balance_rel_threshold is 0.5; it must be at least 1"),
        ("cache_table_blocks", 0, "cache_table_blocks is 0; it must be at least 1"),
    ],
)
def test_settings_say_which_rule_is_broken(field, value, rule):
    with pytest.raises(ValueError, match=rule):
        RoutingSettings(**{field: value})


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 5), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("end"), st.integers(0, 50)),
        st.tuples(st.just("available"), st.integers(0, 2), st.booleans(), st.sampled_from([None, 1, 2])),
        st.tuples(st.just("report"), st.integers(0, 2), st.integers(0, 20)),
        st.tuples(st.just("models"), st.integers(0, 2), st.lists(st.sampled_from(["m0", "m1"]), max_size=2)),
        st.tuples(st.just("forget"), st.integers(0, 2)),
    ),
    max_size=60,
)


def live(steps, policy):
    """A life of three replicas; what was chosen, checked as it goes."""
    of = ReplicaChooser(3, RoutingSettings(policy=policy, cache_table_blocks=8, balance_abs_threshold=2))
    available, limits, flying, chosen = [False] * 3, [None] * 3, [], []
    for kind, *rest in steps:
        if kind == "send":
            who, length, excludes = rest
            request = asking(f"{who}" * 64 * length, model=f"m{who % 2}", session=f"{who}" if who > 3 else "")
            excluded = {who % 3} if excludes else ()
            choice = of.choose(request, excluded)
            assert choice == of.choose(request, excluded), "choosing changed something"
            in_flight = [sum(each[0] == replica for each in flying) for replica in range(3)]
            may = {each for each in range(3) if available[each] and each not in excluded}
            may = {each for each in may if limits[each] is None or in_flight[each] < limits[each]} or may
            assert (choice is None) == (not may)
            chosen.append(choice)
            if choice is not None:
                assert choice.replica in may
                of.begin(choice.replica, request)
                flying.append((choice.replica, request))
        elif kind == "end" and flying:
            of.end(*flying.pop(rest[0] % len(flying)))
        elif kind == "available":
            available[rest[0]], limits[rest[0]] = rest[1], rest[2]
            of.set_available(*rest)
        elif kind == "report":
            of.report_load(*rest)
        elif kind == "models":
            of.set_models(*rest)
        elif kind == "forget":
            of.forget(*rest)
        loads = [of.load(replica) for replica in range(3)]
        assert all(load.num_blocks <= 8 for load in loads), "a table is over its bound"
        assert sum(load.in_flight for load in loads) == len(flying)
        assert sum(load.tokens for load in loads) == sum(request.num_tokens for _, request in flying)
    assert len(of._sessions) <= 8
    return chosen


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
@settings(max_examples=150)
@given(steps=STEPS)
def test_any_life_is_deterministic_bounded_and_never_chooses_who_is_away(policy, steps):
    assert live(steps, policy) == live(steps, policy)


def test_work_per_request_does_not_grow_with_what_is_remembered(monkeypatch):
    lookups = 0

    of = chooser(2)
    table = of._replicas[0].table
    original = type(table).match

    def counted(self, keys):
        nonlocal lookups
        found = original(self, keys)
        lookups += found + 1
        return found

    monkeypatch.setattr(type(table), "match", counted)
    costs = []
    for size in (10, 1000):
        for number in range(size):
            send(of, asking(f"{number:6}" * 40))
        lookups = 0
        of.choose(asking(f"{3:6}" * 40))
        costs.append(lookups)
    assert costs[0] == costs[1]

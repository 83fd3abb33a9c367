"""Whose fault a failed step is, and how far budgets shrink: the policy alone, in worlds that are simulated here."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.recovery import CLEARING, CULPRITS, NOTHING, STRIKES, Suspicion, TokenBudget, Verdict


class World:
    """Requests that run in steps of all that are not held; a step fails if `fails` says so of its rows.

    Attributes:
      left: tokens that each live request still wants.
      ended: the culprits that were found, in order.
      num_failures: steps that failed.
    """

    def __init__(self, left, fails, max_rows=None):
        self.left, self.fails = dict(left), fails
        self.suspicion = Suspicion(max_rows or max(len(self.left), 1))
        self.held = set()
        self.gained = {}
        self.ended = []
        self.num_failures = 0
        self.dead = False

    def step(self):
        rows = [number for number in self.left if number not in self.held]
        assert rows or not self.left, f"{self.held} are held and nobody runs"
        if self.fails(tuple(rows)):
            self.num_failures += 1
            self.gained = dict.fromkeys(rows, 0)
            self.follow(self.suspicion.failed(rows))
            return
        for number in rows:
            self.left[number] -= 1
            self.gained[number] = self.gained.get(number, 0) + 1
            if not self.left[number]:
                del self.left[number]
            if not self.left.get(number) or self.gained[number] >= CLEARING:
                self.follow(self.suspicion.cleared(number))

    def follow(self, verdict):
        self.dead = verdict.hopeless
        if verdict.culprit is not None:
            del self.left[verdict.culprit]
            self.ended.append(verdict.culprit)
        self.held.update(number for number in verdict.hold if number in self.left)
        self.held.difference_update(verdict.release)
        assert self.held <= set(self.suspicion.held)

    def drop(self, number):
        """Its client went away."""
        del self.left[number]
        self.held.discard(number)
        self.follow(self.suspicion.gone([number]))

    def run(self, limit=5000):
        for _ in range(limit):
            if self.dead or not self.left:
                return
            self.step()
        raise AssertionError(f"{self.left} still live, {self.held} held")


def test_after_a_first_failure_all_are_tried_together():
    assert Suspicion(8).failed([1, 2, 3]) == NOTHING


def test_after_a_second_one_half_of_them_is_held():
    suspicion = Suspicion(8)
    suspicion.failed([1, 2, 3, 4, 5])
    assert suspicion.failed([1, 2, 3, 4, 5]) == Verdict(hold=(3, 4, 5))
    assert suspicion.held == {3, 4, 5}


def test_whoever_fails_alone_as_often_as_it_may_ends():
    suspicion = Suspicion(8)
    verdicts = [suspicion.failed([7]) for _ in range(STRIKES)]
    assert verdicts == [NOTHING] * (STRIKES - 1) + [Verdict(culprit=7)]
    assert not suspicion.suspects


def test_a_half_that_is_cleared_lets_the_other_run():
    suspicion = Suspicion(8)
    suspicion.failed([1, 2])
    assert suspicion.failed([1, 2]) == Verdict(hold=(2,))
    assert suspicion.cleared(1) == Verdict(release=(2,))
    assert suspicion.failed([1, 2]) == Verdict(hold=(1,)), "the cleared one may yet have its part in it"
    assert suspicion.failed([2]) == NOTHING
    assert suspicion.failed([2]) == Verdict(culprit=2, release=(1,))


def test_a_request_that_goes_away_lets_the_next_group_run():
    suspicion = Suspicion(8)
    suspicion.failed([1, 2, 3])
    assert suspicion.failed([1, 2, 3]) == Verdict(hold=(2, 3))
    assert suspicion.gone([2]) == NOTHING
    assert suspicion.gone([1]) == Verdict(release=(3,))


def test_a_step_whose_requests_have_all_ended_is_no_reason_to_give_up_but_many_of_them_are():
    suspicion = Suspicion(8)
    verdicts = [suspicion.failed([]) for _ in range(20)]
    assert verdicts[0] == NOTHING and verdicts[-1].hopeless


def test_what_always_fails_is_hopeless():
    world = World(dict.fromkeys(range(8), 5), lambda rows: True)
    world.run()
    assert world.dead and len(world.ended) < CULPRITS


def test_failures_that_come_and_go_are_never_hopeless():
    turns = iter(range(10**6))
    world = World(dict.fromkeys(range(6), 40), lambda rows: next(turns) % 4 == 0)
    world.run()
    assert not world.dead and not world.ended


@pytest.mark.parametrize(("count", "most"), [(1, 2), (2, 5), (8, 7), (64, 10), (256, 12)])
def test_so_many_failures_find_a_culprit_whoever_it_is(count, most):
    numbers = []
    for culprit in range(0, count, max(count // 16, 1)):
        world = World(dict.fromkeys(range(count), 99), lambda rows, culprit=culprit: culprit in rows)
        world.run()
        assert world.ended == [culprit] and not world.dead
        numbers.append(world.num_failures)
    assert max(numbers) <= most, numbers


@given(
    lengths=st.lists(st.integers(1, 99), min_size=1, max_size=12),
    culprits=st.sets(st.integers(0, 11), max_size=2),
    max_rows=st.integers(12, 64),
)
def test_the_culprits_end_and_nobody_else(lengths, culprits, max_rows):
    culprits = {number for number in culprits if number < len(lengths)}
    world = World(enumerate(lengths), lambda rows: not culprits.isdisjoint(rows), max_rows)
    world.run()
    assert not world.dead and set(world.ended) == culprits
    assert world.num_failures <= (len(culprits) + 1) * (3 + 2 * math.ceil(math.log2(len(lengths) + 1)))


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=80),
)
def test_whatever_fails_and_whoever_goes_somebody_may_always_run(lengths, moves):
    """Steps fail at will and clients go away; then all goes well, and everybody left comes to an end."""
    failing = [False]
    world = World(enumerate(lengths), lambda rows: failing[0])
    for fails, number in moves:
        if world.dead or not world.left:
            return
        failing[0] = fails
        if not fails and number in world.left:
            world.drop(number)
        else:
            world.step()
    failing[0] = False
    world.run()
    assert world.dead or not world.left


def test_the_budget_is_halved_down_to_one_token():
    budget = TokenBudget(64)
    seen = []
    while budget.out_of_memory(64):
        seen.append(budget.tokens)
    assert seen == [32, 16, 8, 4, 2, 1] and not budget.out_of_memory(1)


def test_the_size_of_the_step_counts_where_it_is_below_the_budget():
    budget = TokenBudget(512)
    assert budget.out_of_memory(8) and budget.tokens == 4


def test_it_grows_back_when_steps_have_gone_well():
    budget = TokenBudget(20)
    budget.out_of_memory(20)
    assert budget.out_of_memory(10) and budget.tokens == 5
    grown = [budget.tokens for _ in range(3 * TokenBudget.PATIENCE) if budget.good()]
    assert grown == [10, 20] and budget.is_full


@pytest.mark.parametrize("times", [1, 3, 9])
def test_growing_too_far_makes_it_wait_longer(times):
    budget = TokenBudget(64)
    budget.out_of_memory(64)
    for _ in range(times):
        while not budget.good():
            pass
        assert budget.out_of_memory(64) and budget.tokens == 32
    waited = 1
    while not budget.good():
        waited += 1
    assert waited == min(TokenBudget.PATIENCE * 2**times, TokenBudget.MOST_PATIENCE)


@pytest.mark.parametrize(("good_steps", "patience"), [(1023, 128), (1024, 32)])
def test_once_the_full_budget_has_held_it_is_as_patient_as_at_first(good_steps, patience):
    budget = TokenBudget(64)
    budget.out_of_memory(64)
    while not budget.good():
        pass
    budget.out_of_memory(64)
    while not budget.good():
        pass
    for _ in range(good_steps):
        assert not budget.good()
    assert budget.out_of_memory(64)
    waited = 1
    while not budget.good():
        waited += 1
    assert waited == patience


def test_whoever_was_held_beside_one_that_is_tried_alone_is_released():
    suspicion, held = Suspicion(8), set()
    for participants in ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2], [0, 3], [0, 4], [0], [0]):
        verdict = suspicion.failed([each for each in participants if each not in held])
        held = held.union(verdict.hold).difference(verdict.release)
        assert held == suspicion.held
    while runs := [each for each in suspicion.suspects if each not in held]:
        held -= set(suspicion.cleared(runs[0]).release)
    assert not held and not suspicion.held

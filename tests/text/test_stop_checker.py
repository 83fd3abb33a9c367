"""Stop strings: cut at the first one, hold back as little as can be, lose nothing."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.text import StopChecker


def run(stop, pieces, include=False):
    """All deltas, the flush included, and the stop string found."""
    checker = StopChecker(tuple(stop), include)
    shown = [checker.feed(piece)[0] for piece in pieces]
    return [*shown, checker.flush()], checker.stopped


def expected(stop, text, include):
    """The rule by brute force: the first end of any stop string, the longest string ending there."""
    for end in range(1, len(text) + 1):
        found = [word for word in stop if text[:end].endswith(word)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def test_a_stop_string_across_three_deltas_is_cut_and_never_shown():
    shown, stopped = run(["END"], ["one E", "N", "D two"])
    assert shown == ["one ", "", "", ""] and stopped == "END"


def test_the_stop_string_is_shown_when_asked():
    shown, stopped = run(["END"], ["one E", "N", "D two"], include=True)
    assert "".join(shown) == "one END" and stopped == "END"


def test_only_a_possible_beginning_is_held():
    checker = StopChecker(("stop now",))
    assert checker.feed("a st") == ("a ", None)
    assert checker.feed("ep") == ("step", None)
    assert checker.feed("p s") == ("p ", None)
    assert checker.num_held == 1


def test_a_failed_match_may_begin_inside_itself():
    shown, stopped = run(["aab"], list("aaab"))
    assert "".join(shown) == "a" and stopped == "aab"


def test_held_text_comes_out_at_the_end():
    shown, stopped = run(["lo!"], ["hello"])
    assert shown == ["hel", "lo"] and stopped is None


def test_the_first_stop_string_to_complete_wins():
    assert run(["bc", "abcd"], ["xabcd"]) == (["xa", ""], "bc")


def test_of_stop_strings_completed_together_the_longest_is_cut():
    assert run(["c", "bc"], ["abc"]) == (["a", ""], "bc")


def test_after_the_stop_nothing_more_is_shown():
    checker = StopChecker(("x",))
    assert checker.feed("ax") == ("a", "x")
    assert checker.feed("more") == ("", "x") and checker.flush() == ""


def test_without_stop_strings_text_passes():
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


def test_text_before_the_first_feed_does_not_count():
    """A prompt that ends in the stop string's beginning has no part in a match: only fed text is looked at."""
    assert run(["ab"], ["b"]) == (["b", ""], None)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="at least one character"):
        StopChecker(("a", ""))


words = st.text("ab", min_size=1, max_size=5)


@given(
    stop=st.lists(words, max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    include=st.booleans(),
)
def test_any_cut_into_deltas_gives_the_first_stop_string(stop, pieces, include):
    shown, stopped = run(stop, pieces, include)
    assert ("".join(shown), stopped) == expected(stop, "".join(pieces), include)


@given(stop=st.lists(words, min_size=1, max_size=3), pieces=st.lists(st.text("abc", max_size=4), max_size=12))
def test_exactly_the_longest_possible_beginning_is_held(stop, pieces):
    checker = StopChecker(tuple(stop))
    text = ""
    for piece in pieces:
        _, stopped = checker.feed(piece)
        if stopped is not None:
            return
        text += piece
        possible = [n for word in stop for n in range(len(word)) if text.endswith(word[:n])]
        assert checker.num_held == max(possible) < max(map(len, stop))


def test_cost_per_character_does_not_grow_with_what_is_held():
    checker = StopChecker(("a" * 20_000 + "b",))

    def seconds():
        start = time.perf_counter()
        for _ in range(500):
            checker.feed("a")
        return time.perf_counter() - start

    early = min(seconds() for _ in range(3))
    checker.feed("a" * 15_000)
    late = min(seconds() for _ in range(3))
    assert late < 50 * early

"""The sampler against distributions computed by hand in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core import Request, SamplingParams
from jaxserve.runtime import sampler
from jaxserve.runtime.slot_state import SlotState, place_row, slot_row
from jaxserve.tables.layout import FLAG_EDITS, FLAG_HOLD_STOPS, FLAG_LIVE, FLAG_MASKED

VOCAB = 101


def make_state(rows=8):
    return SlotState(
        jnp.zeros(rows + 1, jnp.int32),
        jnp.zeros((rows + 1, VOCAB), jnp.float32),
        jnp.zeros((rows + 1, VOCAB), jnp.bool_),
        jnp.zeros((rows + 1, VOCAB), jnp.bool_),
        jnp.zeros((rows + 1, VOCAB), jnp.int32),
    )


def columns(rows, **overrides):
    fields = dict(
        slot=np.arange(rows),
        flags=np.full(rows, FLAG_LIVE),
        top_k=np.zeros(rows),
        seed_high=np.zeros(rows),
        seed_low=np.arange(rows),
        sample_position=np.zeros(rows),
    )
    floats = dict(
        temperature=np.ones(rows),
        top_p=np.ones(rows),
        min_p=np.zeros(rows),
        presence_penalty=np.zeros(rows),
        frequency_penalty=np.zeros(rows),
        repetition_penalty=np.ones(rows),
    )
    for name, value in overrides.items():
        target = fields if name in fields else floats
        target[name] = np.broadcast_to(np.asarray(value), (rows,))
    return {k: jnp.asarray(v, jnp.int32) for k, v in fields.items()} | {
        k: jnp.asarray(v, jnp.float32) for k, v in floats.items()
    }


@pytest.fixture(scope="module")
def sample():
    jitted = jax.jit(sampler.sample)
    return lambda x, state, fields, masks=None: jitted(x, state, fields, no_masks(x) if masks is None else masks)


def no_masks(x):
    return jnp.zeros((x.shape[0], -(-VOCAB // 32)), jnp.uint32)


def mask_of(ids):
    """uint32[words] that allows `ids` alone."""
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    for token_id in ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words


def logits(rows, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, VOCAB)) * 2, jnp.float32)


def frequencies(sample, row, draws=4000, **settings):
    """How often each token is drawn from one row of logits, over many seeds."""
    tokens = sample(jnp.tile(row, (draws, 1)), make_state(), columns(draws, slot=np.zeros(draws), **settings))
    return np.bincount(np.asarray(tokens), minlength=VOCAB) / draws


def softmax(x):
    e = np.exp(np.asarray(x, np.float64) - np.max(x))
    return e / e.sum()


def test_temperature_zero_takes_the_likeliest(sample):
    x = logits(8)
    np.testing.assert_array_equal(sample(x, make_state(), columns(8, temperature=0)), np.argmax(x, -1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_tempered_distribution(sample, temperature):
    row = logits(1)[0]
    expected = softmax(row / temperature)
    got = frequencies(sample, row, temperature=temperature)
    assert np.abs(got - expected).sum() < 4 * np.sqrt(expected * (1 - expected) / 4000).sum()


@pytest.mark.parametrize("k", [1, 2, 7, VOCAB, 10 * VOCAB])
def test_top_k_keeps_exactly_the_k_likeliest(sample, k):
    row = logits(1)[0]
    kept = set(np.argsort(-np.asarray(row))[:k].tolist())
    got = frequencies(sample, row, top_k=k, temperature=5.0)
    drawn = set(np.flatnonzero(got).tolist())
    assert drawn <= kept
    if k <= 7:
        assert drawn == kept


@pytest.mark.parametrize("p", [1e-9, 0.3, 0.8, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_p(sample, p):
    row = logits(1)[0]
    probabilities = softmax(row)
    order = np.argsort(-probabilities)
    count = int(np.searchsorted(np.cumsum(probabilities[order]), p) + 1)
    drawn = set(np.flatnonzero(frequencies(sample, row, top_p=p)).tolist())
    kept = set(order[:count].tolist())
    assert drawn <= kept
    # Every member likely enough to have been drawn, was.
    assert {t for t in kept if probabilities[t] / probabilities[order[:count]].sum() > 0.01} <= drawn


def test_top_p_one_and_zero_temperature_spread_are_untouched_by_neighbours(sample):
    x = logits(4)
    alone = [sample(x[i : i + 1], make_state(), columns(1, seed_low=i, slot=0))[0] for i in range(4)]
    mixed = sample(x, make_state(), columns(4, top_p=[1, 1, 1, 0.2], top_k=[0, 0, 5, 0], temperature=[1, 1, 0, 1]))
    assert alone[:2] == list(mixed[:2])


def test_min_p_drops_what_is_far_below_the_likeliest(sample):
    row = logits(1)[0]
    probabilities = softmax(row)
    drawn = np.flatnonzero(frequencies(sample, row, min_p=0.2, temperature=1.0))
    assert (probabilities[drawn] >= 0.2 * probabilities.max() * (1 - 1e-5)).all()
    assert set(np.flatnonzero(frequencies(sample, row, min_p=1.0)).tolist()) == {int(np.argmax(row))}


def test_a_row_depends_on_its_seed_and_position_only(sample):
    x = jnp.tile(logits(1), (8, 1))
    settings = dict(seed_low=[1, 1, 1, 2, 2, 3, 3, 3], sample_position=[5, 5, 6, 5, 5, 5, 5, 5])
    tokens = np.asarray(sample(x, make_state(), columns(8, temperature=4.0, **settings)))
    assert tokens[0] == tokens[1] and tokens[3] == tokens[4] and tokens[5] == tokens[6] == tokens[7]
    assert len({tokens[0], tokens[2], tokens[3], tokens[5]}) > 1


def test_minus_infinity_logits_are_never_drawn(sample):
    row = jnp.full(VOCAB, -jnp.inf).at[jnp.array([3, 90])].set(0.0)
    got = frequencies(sample, row, temperature=1.0)
    assert set(np.flatnonzero(got).tolist()) == {3, 90}
    assert abs(got[3] - 0.5) < 0.05


def penalised(x, prompt, outputs, params):
    """The penalties written out, float64."""
    x = np.asarray(x, np.float64).copy()
    for token in set(prompt) | set(outputs):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(outputs):
        x[token] -= params.frequency_penalty * outputs.count(token) + params.presence_penalty
    return x


def test_penalties_match_the_formulae_and_touch_only_their_row(sample):
    x = logits(2)
    top = int(np.argmax(x[0]))
    prompt, outputs = [top, top, top, 4], [7, 7, 9, int(np.argsort(x[0])[-2])]
    params = SamplingParams(presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.9)
    state = place_row(make_state(), 0, slot_row(Request("r", tuple(prompt), params), outputs, -1, VOCAB))
    fields = columns(
        2,
        temperature=0,
        flags=[FLAG_LIVE | FLAG_EDITS, FLAG_LIVE],
        presence_penalty=[1.5, 0],
        frequency_penalty=[0.7, 0],
        repetition_penalty=[1.9, 1],
    )
    tokens = np.asarray(sample(x, state, fields))
    assert tokens[0] == np.argmax(penalised(x[0], prompt, outputs, params))
    assert tokens[1] == np.argmax(x[1])
    edited = sampler._edit(x, state, fields, jnp.array([True, False]))
    np.testing.assert_allclose(edited[0], penalised(x[0], prompt, outputs, params), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(edited[1], x[1])


def test_bias_decides_and_held_stop_ids_lose_even_against_it(sample):
    x = logits(1)
    request = Request("r", (1,), SamplingParams(logit_bias={5: 100.0, 6: 60.0}, stop_token_ids=(5,)))
    state = place_row(make_state(), 0, slot_row(request, [], -1, VOCAB))
    flags = FLAG_LIVE | FLAG_EDITS
    assert sample(x, state, columns(1, flags=flags, temperature=0))[0] == 5
    assert sample(x, state, columns(1, flags=flags | FLAG_HOLD_STOPS, temperature=0))[0] == 6
    assert sample(x, state, columns(1, flags=flags | FLAG_HOLD_STOPS, temperature=1.0))[0] == 6


def test_scores_are_the_raw_distribution():
    x = logits(3)
    tokens = jnp.array([0, 50, int(np.argmax(x[2]))])
    scores = jax.jit(sampler.score)(x, tokens, jnp.array([True, False, False]))
    expected = np.log([softmax(row) for row in np.asarray(x)])
    np.testing.assert_allclose(scores.logprob, expected[np.arange(3), tokens], atol=1e-5)
    assert scores.rank[2] == 1
    assert scores.rank[0] == 1 + (expected[0] > expected[0, 0]).sum()
    np.testing.assert_array_equal(scores.top_ids[0], np.argsort(-expected[0])[:20])
    np.testing.assert_allclose(scores.top_logprobs[0], -np.sort(-expected[0])[:20], atol=1e-5)


def test_nobody_asking_for_scores_gives_zeros():
    scores = jax.jit(sampler.score)(logits(2), jnp.array([1, 2]), jnp.array([False, False]))
    assert not np.any(scores.logprob) and not np.any(scores.top_ids)


@pytest.mark.parametrize("top_p", [1e-6, 1e-7, 1e-40, 0.0])
def test_a_vanishing_top_p_keeps_the_likeliest(sample, top_p):
    x = logits(8)
    np.testing.assert_array_equal(sample(x, make_state(), columns(8, top_p=top_p)), np.argmax(x, -1))


def test_finite_logits_and_minus_infinity_give_an_id_of_the_vocabulary(sample):
    for value in (-np.inf, 3e38):
        x = jnp.full((4, VOCAB), value, jnp.float32)
        tokens = np.asarray(sample(x, make_state(), columns(4, temperature=[0, 1, 1, 1], top_p=[1, 1, 0.5, 1])))
        assert ((tokens >= 0) & (tokens < VOCAB)).all()


SETTINGS = {
    "greedy": {"temperature": 0},
    "drawn": {"top_p": 0.9},
    "edited": {"flags": FLAG_LIVE | FLAG_EDITS},
    "masked": {"flags": FLAG_LIVE | FLAG_MASKED},
}


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_row_of_broken_logits_says_so_and_its_neighbours_are_as_ever(sample, name, value):
    x, settings = logits(4, 3), columns(4, **SETTINGS[name])
    masks = jnp.tile(mask_of(range(0, VOCAB, 2)), (4, 1))
    want = np.asarray(sample(x, make_state(), settings, masks)).tolist()
    for broken in (np.array([18]), np.arange(VOCAB)):
        found = np.asarray(sample(x.at[2, broken].set(value), make_state(), settings, masks)).tolist()
        assert found == [*want[:2], sampler.NOT_A_NUMBER, want[3]]


def test_a_penalty_that_makes_a_logit_infinite_breaks_no_row(sample):
    x = np.full((1, VOCAB), 1e30, np.float32)
    state = make_state()
    state = state._replace(prompt_mask=state.prompt_mask.at[0].set(True))
    settings = columns(1, flags=FLAG_LIVE | FLAG_EDITS, slot=[0], repetition_penalty=1e-10, temperature=0)
    assert np.asarray(sample(jnp.asarray(x), state, settings))[0] >= 0


def test_barred_ids_are_never_drawn_whatever_else_edits_the_row(sample):
    x = logits(1)
    allowed = (3, 9, 40)
    params = SamplingParams(
        allowed_token_ids=allowed, bad_words=("x",), logit_bias={50: 100.0, 9: 2.0}, repetition_penalty=0.01
    )
    request = Request("r", (50, 50), params, bad_token_ids=(40,))
    state = place_row(make_state(), 0, slot_row(request, [50], -1, VOCAB))
    draws = 2000
    settings = dict(slot=np.zeros(draws), flags=FLAG_LIVE | FLAG_EDITS, repetition_penalty=0.01)
    fields = columns(draws, **settings)
    tokens = sample(jnp.tile(x, (draws, 1)), state, fields)
    got = np.bincount(np.asarray(tokens), minlength=VOCAB) / draws
    expected = softmax(np.array([x[0, 3], x[0, 9] + 2]))
    assert set(np.flatnonzero(got).tolist()) == {3, 9}
    np.testing.assert_allclose(got[[3, 9]], expected, atol=0.05)
    for more in (dict(temperature=0), dict(temperature=100.0), dict(top_k=50), dict(top_p=1 - 1e-6), dict(min_p=0.0)):
        drawn = sample(jnp.tile(x, (draws, 1)), state, columns(draws, **settings, **more))
        assert set(np.asarray(drawn).tolist()) <= {3, 9}, more


BOUND = FLAG_LIVE | FLAG_MASKED


@pytest.mark.parametrize(
    "more",
    [
        dict(temperature=0),
        dict(temperature=2e-3),
        dict(temperature=100.0),
        dict(top_k=50),
        dict(top_p=0.9),
        dict(min_p=0.5),
        dict(top_k=1),
    ],
    ids=str,
)
def test_a_masked_token_is_never_drawn_whatever_else_the_row_asks_for(sample, more):
    draws = 500
    x = jnp.tile(logits(1).at[0, 50].set(1e30), (draws, 1))  # the model wants what the grammar bars
    allowed = {0, 31, 32, 100}
    request = Request("r", (50,), SamplingParams(logit_bias={50: 100.0, 31: -100.0}, repetition_penalty=0.01))
    state = place_row(make_state(), 0, slot_row(request, [50], -1, VOCAB))
    settings = dict(slot=np.zeros(draws), flags=BOUND | FLAG_EDITS, repetition_penalty=0.01)
    masks = jnp.tile(mask_of(allowed), (draws, 1))
    drawn = sample(x, state, columns(draws, **settings, **more), masks)
    assert set(np.asarray(drawn).tolist()) <= allowed


def test_a_mask_leaves_the_models_weights_among_what_it_allows(sample):
    draws, allowed = 4000, [3, 40, 96]
    x = jnp.tile(logits(1), (draws, 1))
    masks = jnp.tile(mask_of(allowed), (draws, 1))
    drawn = np.asarray(sample(x, make_state(), columns(draws, slot=np.zeros(draws), flags=BOUND), masks))
    got = np.bincount(drawn, minlength=VOCAB)[allowed] / draws
    np.testing.assert_allclose(got, softmax(np.asarray(x)[0, allowed]), atol=0.03)


def test_rows_without_a_grammar_are_what_they_are_without_masks(sample):
    x = logits(4)
    plain = sample(x, make_state(), columns(4, temperature=[0, 1, 1, 0]))
    flags = [FLAG_LIVE, BOUND, FLAG_LIVE, FLAG_LIVE]
    masked = sample(x, make_state(), columns(4, temperature=[0, 1, 1, 0], flags=flags), jnp.tile(mask_of([7]), (4, 1)))
    assert masked[1] == 7 and np.asarray(masked)[[0, 2, 3]].tolist() == np.asarray(plain)[[0, 2, 3]].tolist()


def test_held_off_stop_ids_are_let_through_where_a_grammar_allows_nothing_else(sample):
    request = Request("r", (1,), SamplingParams(stop_token_ids=(5, 6), min_tokens=3))
    state = place_row(make_state(), 0, slot_row(request, [], -1, VOCAB))
    flags = BOUND | FLAG_EDITS | FLAG_HOLD_STOPS
    for temperature in (0, 0.7, 1, 1.5, 100):
        fields = columns(1, flags=flags, temperature=temperature)
        assert sample(logits(1), state, fields, mask_of([5])[None])[0] == 5
        assert sample(logits(1), state, fields, mask_of([5, 9])[None])[0] == 9


@pytest.mark.parametrize("vocab", [1, 19, 20, 21])
def test_a_vocabulary_near_the_number_of_alternatives_is_scored_to_its_edge(vocab):
    x = jnp.asarray(np.random.default_rng(0).normal(0, 5, (3, vocab)), jnp.float32)
    tokens = jnp.asarray([0, vocab - 1, vocab // 2], jnp.int32)
    scores = sampler.score(x, tokens, jnp.asarray([True, False, False]))
    kept = min(vocab, 20)
    assert scores.top_ids.shape == scores.top_logprobs.shape == (3, kept)
    for row, token in enumerate(tokens.tolist()):
        expected = np.log(softmax(x[row]))
        order = np.argsort(-expected)
        assert scores.top_ids[row].tolist() == order[:kept].tolist()
        assert scores.rank[row] == 1 + order.tolist().index(token)
        np.testing.assert_allclose(scores.top_logprobs[row], expected[order[:kept]], atol=1e-5)


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 1000, 1536])
def test_the_first_of_the_largest_is_taken_wherever_it_lies(vocab):
    rows = np.random.default_rng(vocab).integers(-3, 3, (40, vocab)).astype(np.float32)
    values = [0.0, -0.0, np.inf, -np.inf, np.nan, 7.0, 1e35]
    for row, value in enumerate(values):
        rows[row] = value
    for row in range(len(values), 26):
        rows[row, row * vocab // 26 :] = 9
        rows[row, -1] = 9 if row % 2 else np.nan
    rows[26, vocab // 2] = -np.inf
    rows[27, vocab // 2 :] = -1e35
    found, values = jax.jit(sampler.first_largest)(rows)
    assert found.dtype == jnp.int32
    assert found.tolist() == rows.argmax(axis=-1).tolist()
    np.testing.assert_array_equal(values, rows.max(axis=-1))


def test_an_infinity_beside_nan_gives_one_of_the_two():
    row = np.zeros((1, 1000), np.float32)
    row[0, [300, 301, 700]] = np.inf, -np.inf, np.nan
    assert sampler.first_largest(row)[0][0] in (300, 700)
    assert sampler.first_largest(row[:, :600])[0][0] == 300


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_other_backends_run_argmax_as_it_is(platform):
    x = jax.ShapeDtypeStruct((8, 1000), jnp.float32)
    text = jax.jit(sampler.first_largest).trace(x).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.reduce(") == 1 and "reduce_window" not in text and "call @argmax" in text


def test_a_greedy_batch_hands_its_logits_on_to_nothing(sample):
    """The branch of greedy batches is taken before any that gives back logits, which would copy them."""
    rows, fields = 4, columns(4, temperature=0)
    jaxpr = jax.make_jaxpr(sampler.sample)(logits(rows), make_state(), fields, no_masks(logits(rows)))
    (outer,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond"]
    assert [var.aval.shape for var in outer.outvars] == [(rows,)]

"""Bootstrap intervals against exact quantiles and against what clusters must do."""

import numpy as np
import pytest
from scipy import stats

from diptych.evaluate.intervals import interval


def units_of(number):
    return [f"image-{index}" for index in range(number)]


@pytest.mark.parametrize(("hits", "number"), [(18, 20), (60, 100), (3, 50)])
def test_interval_equals_the_binomial_quantiles_when_units_have_one_question(hits, number):
    # Drawing n of n zeros and ones with replacement is n Bernoulli trials: exact in closed form.
    correct = [True] * hits + [False] * (number - hits)
    found = interval(correct, units=units_of(number), num_resamples=40_000, seed=3)
    low, high = stats.binom.ppf([0.025, 0.975], number, hits / number) / number
    assert found.value == pytest.approx(hits / number)
    assert found.n == number
    assert abs(found.low - low) <= 1 / number + 1e-12
    assert abs(found.high - high) <= 1 / number + 1e-12


def test_interval_agrees_with_scipys_percentile_bootstrap():
    generator = np.random.default_rng(0)
    correct = (generator.random(300) < 0.8).tolist()
    found = interval(correct, units=units_of(300), num_resamples=20_000, seed=1)
    theirs = stats.bootstrap(
        (np.asarray(correct, float),),
        np.mean,
        method="percentile",
        n_resamples=20_000,
        rng=np.random.default_rng(5),
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.005)


def test_repeating_each_images_question_narrows_nothing():
    correct = [True] * 14 + [False] * 6
    once = interval(correct, units=units_of(20), num_resamples=2_000, seed=7)
    nine_times = interval(
        [value for value in correct for _ in range(9)],
        units=[unit for unit in units_of(20) for _ in range(9)],
        num_resamples=2_000,
        seed=7,
    )
    assert (once.low, once.high) == (nine_times.low, nine_times.high)
    assert nine_times.n == 180
    as_if_independent = interval(
        [value for value in correct for _ in range(9)],
        units=units_of(180),
        num_resamples=2_000,
        seed=7,
    )
    assert as_if_independent.high - as_if_independent.low < 0.5 * (once.high - once.low)


def test_the_mean_is_over_questions_not_over_images():
    # One image with three right answers, one with one wrong: 3 / 4, not 1 / 2. Resamples of the two
    # images give 1, 3/4 or 0 with probability 1/4, 1/2, 1/4.
    found = interval(
        [True, True, True, False], units=["a", "a", "a", "b"], num_resamples=4_000, seed=0
    )
    assert (found.value, found.low, found.high, found.n) == (0.75, 0.0, 1.0, 4)


def test_all_right_has_no_width_and_the_seed_decides_the_rest():
    assert interval([True] * 5, units=units_of(5), num_resamples=100, seed=0).low == 1.0
    correct = [True, False] * 30
    first, second, other = (
        interval(correct, units=units_of(60), num_resamples=333, seed=seed) for seed in (1, 1, 2)
    )
    assert first == second
    assert first != other


def test_blocks_of_resamples_do_not_change_the_number_of_resamples(monkeypatch):
    whole = interval([True, False] * 30, units=units_of(60), num_resamples=1_000, seed=1)
    monkeypatch.setattr("diptych.evaluate.intervals._BLOCK_DRAWS", 60 * 7)
    assert interval([True, False] * 30, units=units_of(60), num_resamples=1_000, seed=1) == whole


def test_no_question_is_refused():
    with pytest.raises(ValueError, match="0 answers for 0 units"):
        interval([], units=[], num_resamples=10, seed=0)

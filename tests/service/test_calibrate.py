"""What a replica learns of its steps."""

import random
from dataclasses import replace

import pytest

from service.routing.calibrate import WINDOW_STEPS, Calibration, agreed
from service.routing.cost import StepModel

PRIOR = StepModel(5.0, 0.04, 0.02, 0.01, write_through_state_ms=0.05)
TRUE = StepModel(11.0, 0.06, 0.03, 0.025)


def learned(
    rows: range, prefill: range, noise: float, prior: StepModel = PRIOR, windows: int = 60
) -> StepModel:
    draw, calibration = random.Random(), Calibration(prior)
    for _ in range(windows):
        batch, tokens = draw.choice(rows), draw.choice(prefill)
        for _ in range(WINDOW_STEPS):
            time_ms = TRUE.step_ms(batch, tokens) * draw.uniform(1 - noise, 1 + noise)
            calibration.step(batch, tokens, time_ms)
    return calibration.learned or prior


def test_it_finds_the_constants() -> None:
    model = learned(range(1, 200), range(0, 400), noise=0.05)
    # A mean of 32 steps errs by 0.05 / sqrt(3 * 32), half a percent; constants come from differences.
    assert model.fixed_ms == pytest.approx(TRUE.fixed_ms, rel=0.05)
    assert model.slope_ms == pytest.approx(TRUE.slope_ms, rel=0.05)
    assert model.prefill_token_ms == pytest.approx(TRUE.prefill_token_ms, rel=0.05)


def test_the_slope_keeps_the_proportions_of_the_prior() -> None:
    model = learned(range(1, 200), range(0, 400), noise=0.0)
    assert model.state_ms / model.row_ms == pytest.approx(PRIOR.state_ms / PRIOR.row_ms)
    assert model.write_through_state_ms == pytest.approx(0.05 * TRUE.slope_ms / PRIOR.slope_ms)


def test_one_batch_scales_the_prior() -> None:
    """It cannot tell what is fixed from what a row adds, and still predicts that batch."""
    model = learned(range(64, 65), range(0, 1), noise=0.02)
    assert model.step_ms(64) == pytest.approx(TRUE.step_ms(64), rel=0.02)
    assert model.fixed_ms / model.slope_ms == pytest.approx(PRIOR.fixed_ms / PRIOR.slope_ms)


def test_what_explains_nothing_is_not_believed() -> None:
    draw, calibration = random.Random(), Calibration(PRIOR)
    for _ in range(60):
        rows = draw.randrange(1, 200)
        for _ in range(WINDOW_STEPS):
            calibration.step(rows, 0, draw.choice([1.0, 40.0]))
    model = calibration.learned
    assert model is not None
    assert model.fixed_ms / model.slope_ms == pytest.approx(PRIOR.fixed_ms / PRIOR.slope_ms)


def test_too_little_is_not_believed() -> None:
    assert learned(range(1, 200), range(0, 400), noise=0.0, windows=7) is PRIOR


def test_a_machine_that_slows_down_is_noticed() -> None:
    calibration, draw = Calibration(PRIOR), random.Random()
    for factor in (1.0, 2.0):
        for _ in range(200):
            rows, tokens = draw.randrange(1, 200), draw.randrange(0, 400)
            for _ in range(WINDOW_STEPS):
                calibration.step(rows, tokens, factor * TRUE.step_ms(rows, tokens))
    assert calibration.learned is not None
    assert calibration.learned.step_ms(100, 50) == pytest.approx(2 * TRUE.step_ms(100, 50), rel=0.05)


def test_replicas_of_a_pool_agree_but_for_a_slow_one() -> None:
    near = [replace(TRUE, fixed_ms=11.0 + draw) for draw in (-0.2, 0.0, 0.2)]
    assert [model.fixed_ms for model in agreed(near, [5, 50, 500], PRIOR)] == pytest.approx([11.0] * 3)
    slow = replace(TRUE, fixed_ms=22.0)
    *others, last = agreed([*near, slow], [5, 5, 5, 5], PRIOR)
    assert last is slow
    assert len({id(model) for model in others}) == 1
    assert agreed([], [], PRIOR) == []


def test_a_step_that_stood_still_is_not_learned() -> None:
    """A pause of ten seconds among steps of 16 ms would otherwise close the pool for good."""
    calibration = Calibration(PRIOR)
    for number in range(40 * WINDOW_STEPS):
        calibration.step(50, 10, 10_000 if number == 600 else TRUE.step_ms(50, 10))
    assert calibration.learned is not None
    assert calibration.learned.step_ms(50, 10) == pytest.approx(TRUE.step_ms(50, 10), rel=0.01)


def test_a_slow_replica_leaves_the_others_as_they_are() -> None:
    slow = replace(TRUE, fixed_ms=47.0)
    first, second = agreed([TRUE, slow], [5, 5], PRIOR)
    assert first.fixed_ms == TRUE.fixed_ms
    assert second is slow


def test_a_new_replica_is_as_the_others() -> None:
    """By what the configuration says it might look faster, and would get all requests."""
    assert [model.fixed_ms for model in agreed([TRUE, None], [5, 0], PRIOR)] == [TRUE.fixed_ms] * 2
    assert agreed([None, None], [0, 0], PRIOR) == [PRIOR, PRIOR]

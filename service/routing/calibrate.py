"""What steps cost, learned from the steps that a replica takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median_low

import numpy as np

from service.routing.cost import StepModel

WINDOW_STEPS = 32
"""Steps that are one observation: what a single one brings in is not always counted in the same one."""
FORGET = 0.98
"""What an observation still counts for after the next."""
ENOUGH_WINDOWS = 8
OUTLIER = 3.0
"""A window of steps this much longer than the mean is no batch: something stood still, or was compiled."""
MOST_OUTLIERS = 3
"""In a row; after that it is how things are."""
FIT = 0.8
"""Share of the variance (R squared) that a learned model must explain."""
SLOW = 1.5
"""A replica whose steps take this much longer than its pool's is taken for a slow one."""


def agreed(models: Sequence[StepModel | None], rows: Sequence[int], prior: StepModel) -> list[StepModel]:
    """What to go by for replicas of one pool, which hold `rows`: the mean of what they learned, because by
    small differences between equals all requests would go to one of them; its own for one that is SLOW, which
    the mean leaves out. One that has learned nothing (None) is as the others, all of them as `prior`."""
    learned = [model for model in models if model is not None]
    if not learned:
        return [prior] * len(models)
    held = fmean(rows)
    usual_ms = median_low(model.step_ms(held) for model in learned)
    usual = [model for model in learned if model.step_ms(held) <= SLOW * usual_ms]
    mean = StepModel(
        fmean(model.fixed_ms for model in usual),
        fmean(model.row_ms for model in usual),
        fmean(model.state_ms for model in usual),
        fmean(model.prefill_token_ms for model in usual),
        usual[0].write_through_state_ms,
    )
    return [mean if model is None or model in usual else model for model in models]


@dataclass
class Calibration:
    """Least squares over windows of steps, recent ones counting more. ``prior`` holds until they suffice.

    A window is (steps, rows, prompt tokens; milliseconds), each summed, so that the coefficients are those of
    StepModel. Step times with one batch alone cannot tell the fixed part from that of a row: then the prior's
    shape is kept and scaled.
    """

    prior: StepModel
    _normal: np.ndarray = field(default_factory=lambda: np.zeros((3, 3)))
    _right: np.ndarray = field(default_factory=lambda: np.zeros(3))
    _squares: float = 0.0
    _windows: int = 0
    _outliers: int = 0
    _sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0])

    def step(self, rows: int, prefill_tokens: int, step_ms: float) -> None:
        """One step that was taken."""
        for index, value in enumerate((1.0, rows, prefill_tokens, step_ms)):
            self._sums[index] += value
        if self._sums[0] < WINDOW_STEPS:
            return
        # Per step, so that a window weighs as any other.
        *sums, total_ms = (value / self._sums[0] for value in self._sums)
        self._sums = [0.0, 0.0, 0.0, 0.0]
        if self._is_outlier(total_ms):
            self._outliers += 1
            return
        self._outliers = 0
        features = np.array(sums)
        self._normal = FORGET * self._normal + np.outer(features, features)
        self._right = FORGET * self._right + features * total_ms
        self._squares = FORGET * self._squares + total_ms * total_ms
        self._windows += 1

    def _is_outlier(self, mean_ms: float) -> bool:
        if self._windows < ENOUGH_WINDOWS or self._outliers >= MOST_OUTLIERS:
            return False
        return bool(mean_ms > OUTLIER * self._right[0] / self._normal[0, 0])

    @property
    def learned(self) -> StepModel | None:
        """What the steps say; None before there were enough."""
        if self._windows < ENOUGH_WINDOWS:
            return None
        learned = self._solve()
        return self._scaled() if learned is None else self._like_prior(*learned)

    def _solve(self) -> tuple[float, float, float] | None:
        if np.linalg.cond(self._normal) > 1e10:
            return None
        fixed, slope, prefill = (float(value) for value in np.linalg.solve(self._normal, self._right))
        if min(fixed, slope, prefill) < 0:
            return None
        explained = float(self._right @ np.array([fixed, slope, prefill]))
        mean_square = float(self._right[0]) ** 2 / float(self._normal[0, 0])
        spread = self._squares - mean_square
        if spread <= 0 or (explained - mean_square) / spread < FIT:
            return None
        return fixed, slope, prefill

    def _scaled(self) -> StepModel:
        """The prior, times how much longer steps take than it says."""
        prior = np.array([self.prior.fixed_ms, self.prior.slope_ms, self.prior.prefill_token_ms])
        said = float(prior @ self._normal @ prior)
        return self._like_prior(*(prior * (float(prior @ self._right) / said))) if said > 0 else self.prior

    def _like_prior(self, fixed: float, slope: float, prefill: float) -> StepModel:
        """A slope divided between row and state as the prior divides it."""
        prior = self.prior
        state = prior.state_ms / prior.slope_ms if prior.slope_ms else 0.0
        through = prior.write_through_state_ms
        return StepModel(
            fixed,
            slope * (1 - state),
            slope * state,
            prefill,
            None if through is None or not prior.slope_ms else through * slope / prior.slope_ms,
        )

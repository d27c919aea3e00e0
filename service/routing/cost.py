"""What a decode step costs, and from which batch on DeltaLog pays."""

from dataclasses import dataclass
from math import ceil

WORTH_WHILE = 0.03
"""DeltaLog pays where a step is at least this share shorter than a write-through step of the same batch."""


@dataclass(frozen=True, slots=True)
class StepModel:
    """Milliseconds of a step: linear in the rows that decode and the prompt tokens that it takes in.

    fixed_ms: weights and launches, whatever the batch. row_ms: what a row adds outside the recurrent layers.
    state_ms: what its recurrent state adds, all layers; with a log, the mean over a cycle.
    prefill_token_ms: what a prompt token adds. write_through_state_ms: state_ms without a log.
    """

    fixed_ms: float
    row_ms: float
    state_ms: float
    prefill_token_ms: float
    write_through_state_ms: float | None = None

    @property
    def slope_ms(self) -> float:
        """What one more row adds to a step."""
        return self.row_ms + self.state_ms

    def step_ms(self, rows: float, prefill_tokens: float = 0.0) -> float:
        """A step of ``rows`` rows that takes in ``prefill_tokens`` prompt tokens."""
        return self.fixed_ms + self.slope_ms * rows + self.prefill_token_ms * prefill_tokens

    def steady_step_ms(self, rows: float, prefill_tokens_per_s: float) -> float:
        """A step where prompts keep coming: it takes in what arrived during the step before. Infinite where
        they come faster than they can be taken in."""
        idle = 1 - self.prefill_token_ms * prefill_tokens_per_s / 1000
        return self.step_ms(rows) / idle if idle > 0 else float("inf")

    @property
    def saved_row_ms(self) -> float:
        """What the log saves a row, beyond the share that makes it WORTH_WHILE; 0 where it never pays."""
        if self.write_through_state_ms is None:
            return 0.0
        needed = WORTH_WHILE * (self.row_ms + self.write_through_state_ms)
        return max(0.0, self.write_through_state_ms - self.state_ms - needed)

    @property
    def break_even_rows(self) -> int:
        """The smallest batch at which the log makes a step WORTH_WHILE shorter; 1 where it never does."""
        return max(1, ceil(WORTH_WHILE * self.fixed_ms / self.saved_row_ms)) if self.saved_row_ms else 1

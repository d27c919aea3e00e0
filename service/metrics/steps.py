"""What the steps of an engine take, and what the configured cost of a step says of the same ones."""

from bisect import bisect_left

from service.metrics.spec import MetricSpec, add
from service.pools import PoolConfig
from service.routing.cost import StepModel

ROWS = tuple(2**power for power in range(10))
BATCHES = (*map(str, ROWS), "more")
MODES = ("decode", "mixed")

DECODE_BATCH = MetricSpec(
    "deltalog_decode_batch_rows",
    "histogram",
    "rows",
    "Rows that get a token in a step, one sample a step.",
    buckets=tuple(map(float, ROWS)),
)
STEP_ROWS = MetricSpec(
    "deltalog_step_rows_total",
    "counter",
    "rows",
    "Sum of the samples of deltalog_decode_batch_rows; by deltalog_steps_total, the mean batch.",
)
STEPS = MetricSpec(
    "deltalog_steps_total",
    "counter",
    "steps",
    "Steps of the engine, by the upper edge of their decode batch, and whether they also took in prompt "
    "tokens (mixed).",
    labels={"mode": MODES, "batch": BATCHES},
)
STEP_SECONDS = MetricSpec(
    "deltalog_step_seconds_total",
    "counter",
    "seconds",
    "Time of these steps, each from the end of the one before.",
    labels=STEPS.labels,
)
PREDICTED_STEP_SECONDS = MetricSpec(
    "deltalog_predicted_step_seconds_total",
    "counter",
    "seconds",
    "Time that the pool's configured cost gives the same steps: as configured, and without a log "
    "(write_through). Only for pools with a cost; write_through stays 0 where the cost does not say it.",
    labels={"curve": ("configured", "write_through")},
)
MODEL_ERROR = MetricSpec(
    "deltalog_model_error_seconds_total",
    "counter",
    "seconds",
    "Difference, whatever its sign and second by second, between what steps took and what their cost says: "
    "the one that the replica learned or, before there is one, the configured. By "
    "deltalog_step_seconds_total, the relative error.",
)
RECURRENT_SHARE = MetricSpec(
    "deltalog_recurrent_share_estimated_ratio",
    "gauge",
    "ratio",
    "Share of a step that the recurrent layers take, estimated from the configured cost at the last decode "
    "batch; only for pools with a cost.",
)
BREAK_EVEN = MetricSpec(
    "deltalog_break_even_rows",
    "gauge",
    "rows",
    "Decode batch from which on the log makes a step 3 % shorter, by the configured cost; none where it "
    "never does, and without a cost.",
)


class StepMetrics:
    """Counts the steps of one engine. What a step adds is kept here and told Ray once a second: there may be
    thousands of steps in it."""

    def __init__(self, pool: PoolConfig) -> None:
        self._batch = DECODE_BATCH.bind(pool)
        self._rows = STEP_ROWS.bind(pool)
        self._steps = STEPS.bind(pool)
        self._seconds = STEP_SECONDS.bind(pool)
        self._error = MODEL_ERROR.bind(pool)
        self._taken: dict[tuple[int, int], list[float]] = {}
        """Steps, rows and seconds since the last report, by index of mode and batch."""
        self._last_rows = 0
        self._prefill_tokens = 0
        self._cost = self._model = pool.configured_cost
        if self._cost is not None:
            self._predicted = PREDICTED_STEP_SECONDS.bind(pool)
            self._share = RECURRENT_SHARE.bind(pool)
            self._break_even = BREAK_EVEN.bind(pool)

    def step(self, rows: int, prefill_tokens: int, seconds: float) -> None:
        """One step that decoded ``rows`` rows and took in ``prefill_tokens`` prompt tokens."""
        self._batch.observe(rows)
        taken = self._taken.setdefault((prefill_tokens > 0, bisect_left(ROWS, rows)), [0.0, 0.0, 0.0])
        taken[0] += 1
        taken[1] += rows
        taken[2] += seconds
        self._last_rows = rows or self._last_rows
        self._prefill_tokens += prefill_tokens

    def publish(self, learned: StepModel | None) -> None:
        """Tell Ray what was added, and again what does not change, which Ray forgets otherwise. From now on a
        step costs what the engine has ``learned``, if it has."""
        steps = rows = seconds = 0.0
        for (mode, batch), taken in self._taken.items():
            tags = {"mode": MODES[mode], "batch": BATCHES[batch]}
            add(self._steps, taken[0], **tags)
            add(self._seconds, taken[2], **tags)
            steps, rows, seconds = steps + taken[0], rows + taken[1], seconds + taken[2]
        add(self._rows, rows)
        if self._model is not None:
            add(self._error, abs(seconds - self._seconds_of(self._model, steps, rows)))
        self._model = learned or self._model
        if self._cost is not None:
            self._predict(self._cost, steps, rows)
        self._taken, self._prefill_tokens = {}, 0

    def _predict(self, cost: StepModel, steps: float, rows: float) -> None:
        predicted_s = self._seconds_of(cost, steps, rows)
        add(self._predicted, predicted_s, curve="configured")
        if cost.write_through_state_ms is not None:
            more_ms = (cost.write_through_state_ms - cost.state_ms) * rows
            add(self._predicted, predicted_s + more_ms / 1000, curve="write_through")
        if steps and cost.step_ms(self._last_rows):
            self._share.set(cost.state_ms * self._last_rows / cost.step_ms(self._last_rows))
        if cost.saved_row_ms:
            self._break_even.set(cost.break_even_rows)

    def _seconds_of(self, cost: StepModel, steps: float, rows: float) -> float:
        """What the steps since the last report cost. It is linear: many cost what as many mean ones do."""
        if not steps:
            return 0.0
        return steps * cost.step_ms(rows / steps, self._prefill_tokens / steps) / 1000

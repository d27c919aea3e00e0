"""Does the log pay?"""

from typing import Any

from dashboards.panels import Query, board, heat_panel, line_panel, stat_panel
from dashboards.promql import EACH, WINDOW, highest, lowest, mean, over, rate, series, total
from service.metrics.log import (
    ASIDE,
    LIVE_ENTRIES,
    MERGE_INTERVAL,
    MERGES,
    STATE_BYTES,
    WRITE_THROUGH_BYTES,
)
from service.metrics.requests import GENERATED_TOKENS, RUNNING_REQUESTS, TPOT, TPOT_SUM
from service.metrics.steps import (
    BREAK_EVEN,
    DECODE_BATCH,
    PREDICTED_STEP_SECONDS,
    RECURRENT_SHARE,
    STEP_ROWS,
    STEPS,
)

PREDICTED = (
    over(
        rate(PREDICTED_STEP_SECONDS, curve="write_through"), rate(PREDICTED_STEP_SECONDS, curve="configured")
    )
    + " > 0"
)
"""Both from the cost: over measured steps it would say how fast the machine is, not what the log saves."""
MEAN_BATCH = over(rate(STEP_ROWS), rate(STEPS))
FEWER_BYTES = over(rate(WRITE_THROUGH_BYTES), rate(STATE_BYTES))
FEWER_WRITES = over(rate(WRITE_THROUGH_BYTES, direction="write"), rate(STATE_BYTES, direction="write"))
WITH_LOG = f"(max by ({', '.join(EACH)}) (max_over_time({series(MERGE_INTERVAL)}[{WINDOW}])) > 1)"
"""Over the window of the rates: a gauge is gone soon after its replica."""


def _stock(rates: str) -> str:
    """Sum over the pools of each model that decode without a log."""
    return f"sum by (model) ({rates} unless on ({', '.join(EACH)}) {WITH_LOG})"


STOCK_TPOT = over(_stock(rate(TPOT_SUM)), _stock(rate(TPOT, part="count")))
MEAN_TPOT = mean(TPOT_SUM, TPOT)
OBSERVED = f"({STOCK_TPOT}) / on (model) group_right () ({MEAN_TPOT} and on ({', '.join(EACH)}) {WITH_LOG})"
"""Mean TPOT of a model's pools without a log over that of each of its pools with one."""
SPEED_UP = (
    Query(OBSERVED, "{{pool}} observed, A/B"),
    Query(PREDICTED, "{{pool}} predicted"),
    Query(FEWER_BYTES, "{{pool}} limit: bytes"),
)


def build() -> dict[str, Any]:
    """The board that says what the log saves."""
    stats = [
        stat_panel(
            "Speed-up",
            "How much longer a token takes without the log. Observed: mean TPOT of the same model's pools "
            "without a log. Predicted: what the configured cost gives the same steps without and with a log. "
            "Limit: bytes of base and log, the speed-up of a step that did nothing else. If it is under 1, "
            "see the batch against break-even below; where no line of break-even is drawn, the log pays at "
            "no batch, as on a CPU.",
            "suffix:x",
            *SPEED_UP,
            steps=[(0, "red"), (1, "green")],
        ),
        stat_panel(
            "Write reduction",
            "State bytes that write-through would have written, over those written. It nears the merge "
            "interval M. If it is far below, prompts are folded into the log often (see bytes by kind), or "
            "M is small.",
            "suffix:x",
            Query(FEWER_WRITES),
            steps=[(0, "red"), (1, "orange"), (2, "green")],
        ),
        stat_panel(
            "Merge interval",
            "Steps a merge, M. If it is not what the pool's configuration says, old replicas still serve.",
            "none",
            Query(highest(MERGE_INTERVAL)),
        ),
        stat_panel(
            "Merges per token",
            "Merges of all layers for one generated token: about the number of recurrent layers over M. If "
            "it is 0 under load, logs never merge: that is a fault, report it.",
            "none",
            Query(over(rate(MERGES), rate(GENERATED_TOKENS))),
        ),
        stat_panel(
            "Decode batch",
            "Tokens a step: mean rows that it decodes, and first tokens of prompts. If it stays under the "
            "break-even batch below, the log costs more than it saves: pack requests onto fewer replicas.",
            "suffix:rows",
            Query(MEAN_BATCH),
        ),
        stat_panel(
            "Replicas aside",
            "Replicas that decode as stock vLLM although their pool has a merge interval. If it is above 0, "
            "their log says why in one warning.",
            "none",
            Query(total(ASIDE)),
            steps=[(1, "red")],
        ),
    ]
    panels = [
        line_panel(
            "Speed-up over write-through",
            "Observed needs two pools of one model, with and without a log, under like load; predicted "
            "needs a pool's cost with write_through_state_ms. If predicted and observed part, calibrate the "
            "cost.",
            "suffix:x",
            *SPEED_UP,
        ),
        line_panel(
            "Mean TPOT, for A/B",
            "Mean time per output token of each pool, with its model, to compare pools of one model. If the "
            "pool with the log is the slower one, compare the batches first: they must be alike.",
            "s",
            Query(MEAN_TPOT, "{{model}}: {{pool}}"),
        ),
        line_panel(
            "State bytes written",
            "Bytes of base state and log written a second, and what write-through would have written. If "
            "they come close, most steps merge: see the merge interval and the folds.",
            "Bps",
            Query(rate(STATE_BYTES, direction="write"), "{{pool}} written"),
            Query(rate(WRITE_THROUGH_BYTES, direction="write"), "{{pool}} write-through"),
        ),
        line_panel(
            "State bytes written per token",
            "The same for one generated token: independent of load. If it moves, the mix of prompts and "
            "decode has changed, or the merge interval.",
            "bytes",
            Query(over(rate(STATE_BYTES, direction="write"), rate(GENERATED_TOKENS)), "{{pool}} written"),
            Query(
                over(rate(WRITE_THROUGH_BYTES, direction="write"), rate(GENERATED_TOKENS)),
                "{{pool}} write-through",
            ),
        ),
        line_panel(
            "State bytes moved by kind",
            "Bytes read and written a second by what moved them. If fold and fill are more than a few per "
            "cent, prompts arrive in chunks that find live logs: raise the chunk size.",
            "Bps",
            Query(rate(STATE_BYTES, "kind"), "{{pool}} {{kind}}"),
            stacked=True,
        ),
        line_panel(
            "Merges",
            "Merges a second, all layers of all replicas. If it falls to 0 while tokens flow, logs never "
            "merge: that is a fault, report it.",
            "suffix:/s",
            Query(rate(MERGES)),
        ),
        line_panel(
            "Live log entries per request",
            "Live entries over all layers, for one request that the engine holds. With merges spread over "
            "the layers it stays near layers x (M - 1) / 2. If it sticks at 0, every step merges.",
            "none",
            Query(over(total(LIVE_ENTRIES), total(RUNNING_REQUESTS))),
        ),
        line_panel(
            "Recurrent share and bytes left",
            "Recurrent layers' share of a step, estimated from the configured cost (where a pool has one), "
            "and the share of write-through's bytes that the log still moves. A step saves at most share x "
            "(1 - left). If the share is small, other layers rule: batch more or leave the log off.",
            "percentunit",
            Query(highest(RECURRENT_SHARE), "{{pool}} recurrent share, largest"),
            Query(lowest(RECURRENT_SHARE), "{{pool}} recurrent share, smallest"),
            Query(over(rate(STATE_BYTES), rate(WRITE_THROUGH_BYTES)), "{{pool}} bytes left"),
        ),
        heat_panel(
            "Decode batches",
            "Steps a second by the rows that they decode, all chosen pools together. If the dark band lies "
            "under break-even, requests are spread too thin.",
            "none",
            f"sum by (le) (rate({series(DECODE_BATCH, 'bucket')}[{WINDOW}]))",
        ),
        line_panel(
            "Decode batch against break-even",
            "Mean rows that get a token in a step, and the batch from which on the log makes a step 3 % "
            "shorter (where a pool has a cost and the log ever does). If the mean stays under it, pack onto "
            "fewer replicas.",
            "suffix:rows",
            Query(MEAN_BATCH),
            Query(highest(BREAK_EVEN), "{{pool}} break-even"),
        ),
    ]
    return board(
        "deltalog-log",
        "DeltaLog / Log",
        "Does the log pay. Only pools with a merge interval have its figures.",
        stats,
        panels,
    )

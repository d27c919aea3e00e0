"""When alerts begin, and what is near to them and does not count: for thresholds, windows and `for`."""

from dataclasses import dataclass

from rule_cases import (
    Series,
    decoding,
    everything_but,
    one,
    outcomes,
    predicting,
    scaling,
    stepping,
    verdicts,
)

from service.metrics.log import ASIDE
from service.metrics.requests import REQUESTS, TPOT
from service.metrics.routing import PREDICTED_TPOT, QUEUED, READY


@dataclass(frozen=True)
class Course:
    """A sample a minute. At minute ``quiet`` no alert of this severity fires, at ``fires`` one does."""

    severity: str
    name: str
    series: Series
    quiet: int
    fires: int | None = None


def burn(promise: str) -> list[Course]:
    late = verdicts(promise, "0x60", "0+1x60")

    def shares(before: str, after: str) -> Series:
        """Of 100 sequences a minute."""
        return verdicts(promise, "0+80x400", f"{before} {after}")

    return [
        Course("critical", "the twentieth late one, and two minutes", late, 21, 22),
        Course("warning", "the twentieth late one, and a quarter of an hour", late, 34, 35),
        Course("critical", "the hour is below", shares("0+9x54", "486+30x10"), 60),
        Course("critical", "the last minutes are below", shares("0+30x50", "1500+10x20"), 60),
        Course("warning", "the six hours are below", shares("0+3x300", "900+20x40"), 330),
        Course("warning", "the half hour is below", shares("0+20x300", "6000+4x60"), 345),
    ]


COURSES = {
    "DeltaLogTpotBurnRate": burn("tpot"),
    "DeltaLogTtftBurnRate": burn("ttft"),
    "DeltaLogNoReadyReplica": [
        Course("critical", "two minutes of five", one(READY, "0 0 0 1 1 " * 8), 4, 20),
        Course("critical", "one goes for good", one(READY, "1x10 0x40"), 20, 21),
    ],
    "DeltaLogQueueGrowing": [
        Course("warning", "it is long at once", one(QUEUED, "0x10 64x60"), 20, 21),
        Course("warning", "it was longer before", one(QUEUED, "400x30 60x60"), 50, 51),
        Course("warning", "it dips for two minutes of five", one(QUEUED, "100 100 100 80 80 " * 8), 4, 20),
        Course("warning", "it drains by a tenth in five minutes", one(QUEUED, "900-20x40"), 39),
    ],
    "DeltaLogRefusals": [
        Course("warning", "twenty requests", outcomes("0x60", ok="0x60", rejected="0+1x60"), 24, 25),
        Course("warning", "the half hour is below",
               outcomes("0x60", ok="0+8x60", rejected="0+1x34 35+8x20"), 41),
        Course("warning", "the last minutes are below",
               outcomes("0x60", ok="0+8x60", rejected="0+8x34 273+1.4x20"), 45),
    ],
    "DeltaLogErrorRatio": [
        Course("critical", "twenty requests", outcomes("0+1x60", ok="0x60"), 21, 22),
        Course("critical", "the half hour is below", outcomes("0+3x32 99+20x20", ok="0+97x60"), 36),
        Course("critical", "the last minutes are below", outcomes("0+20x32 643+4x20", ok="0+97x60"), 40),
    ],
    "DeltaLogScaleStuck": [
        Course("warning", "no node for a second one", scaling("1x5 2x60", "1x60"), 20, 21),
        Course("warning", "one came, and the last does not", scaling("10x90", "8x10 9x80"), 40, 41),
        Course("warning", "twice as many are wanted", scaling("8x20 16x90", "7 8 " * 50), 50, 51),
        Course("warning", "they begin to fall", scaling("8x90", "8x19 " + "5 6 " * 40), 40, 46),
    ],
    "DeltaLogMetricsAbsent": [
        Course("critical", "the last sample, and five minutes",
               everything_but(REQUESTS) | one(REQUESTS, "1x5", outcome="ok"), 14, 16),
    ],
    "DeltaLogNeverMerges": [
        Course("critical", "M of 2, sequences a little longer",
               decoding("2x60", "0x60", "0+600x60", "0+190x60"), 5, 6),
        Course("critical", "sequences a little longer than a cycle",
               decoding("8x60", "0x60", "0+600x60", "0+63x60"), 6, 10),
        Course("critical", "sequences a little shorter than a cycle",
               decoding("8x60", "0x60", "0+600x60", "0+69x60"), 40),
        Course("critical", "a little more than a hundred cycles",
               decoding("8x60", "0x60", "0+60x60", "0+1x60"), 18, 40),
        Course("critical", "a little less than a hundred cycles",
               decoding("8x60", "0x60", "0+50x60", "0+1x60"), 40),
        Course("critical", "seldom merges", decoding("8x60", "0+20x60"), 40),
        Course("critical", "ceases to merge",
               decoding("8x60", "0+20x10 200x40", "0+600x60", "0+6x60"), 29, 32),
    ],
    "DeltaLogStepSlowerThanWriteThrough": [
        Course("warning", "M of 2", stepping("0+11x60", "0+10x60", "2x60"), 15, 17),
    ],
    "DeltaLogPredictionOff": [
        Course("warning", "twenty predictions",
               predicting("0+0.015x60", "0+0.2x60") | one(PREDICTED_TPOT, "0+1x60", "_count"), 34, 36),
        Course("warning", "twenty samples",
               predicting("0+0.15x60", "0+0.02x60") | one(TPOT, "0+1x60", "_count", replica="b"), 34, 36),
    ],
    "DeltaLogDecodesAsStock": [
        Course("warning", "one stands aside", one(ASIDE, "0x5 1x20"), 9, 11),
    ],
}  # fmt: skip

"""The autoscaling policy as Serve's controller asks it, with samples as replicas send them."""

from types import SimpleNamespace
from typing import Any

import pytest

from service import scaling
from service.engine.protocol import Demand
from service.pools import PoolConfig
from service.routing.cost import StepModel
from service.scaling import PoolScaling, load_of, stats

MODEL = StepModel(10.0, 2.0, 0.0, 0.0)
POOL = PoolConfig.model_validate(
    {
        "name": "p",
        "model": "m",
        "max_replicas": 4,
        "start_s": 2.0,
        "slo": {"tpot_ms": 30, "ttft_ms": 1000},
        "sim": {"fixed_ms": 10, "per_row_ms": 2, "per_prefill_token_ms": 0},
    }
)


def sample(order: int, rows: int, *demands: Demand) -> dict[str, float]:
    return stats(order, rows, MODEL, demands)


class Serve:
    """What Serve keeps of a pool between two questions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(scaling.time, "monotonic", lambda: self.now_s)
        self.policy = PoolScaling((POOL.model_copy(update=settings)).model_dump(mode="json"))
        self.target = 1

    def asks(self, *rows: int) -> int:
        """Two seconds later, with replicas that hold so many rows. Returns what is wanted then."""
        self.now_s += 2
        samples = {f"r{order}": sample(order, held) for order, held in enumerate(rows)}
        names = next(iter(samples.values()), {}).keys()
        raw = {
            name: {of: [SimpleNamespace(value=values[name])] for of, values in samples.items()}
            for name in names
        }
        self.target, _ = self.policy(
            SimpleNamespace(target_num_replicas=self.target, running_replicas=list(samples), raw_metrics=raw)
        )
        return self.target


def test_it_follows_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Serve(monkeypatch)
    assert serve.asks(8) == 1
    assert serve.asks(9) == 2, "nine rows take 28 ms, more than 0.9 of 30"
    assert serve.asks(9) == 2, "one starts"
    assert serve.asks(5, 4) == 2
    assert [serve.asks(3, 0) for _ in range(12)][-1] == 1, "after 20 s of little load"
    assert serve.asks() == 1


def test_advice_is_asked_further_and_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Serve(monkeypatch, advisory=True)
    advised = []
    monkeypatch.setattr(serve.policy, "_gauge", SimpleNamespace(set=advised.append))
    serve.target = 3
    assert [serve.asks(0, 0, 0) for _ in range(40)] == [3] * 40
    assert advised[-1] == 1
    assert advised == sorted(advised, reverse=True) or advised[0] == 1
    for _ in range(3):
        assert serve.asks(10, 10, 4) == 3
    assert advised[-1] == 3


def test_what_the_newest_hold_beyond_the_target_waits() -> None:
    samples = {"new": sample(2, 5), "old": sample(1, 7)}
    load = load_of(samples, 1, POOL)
    assert [view.replica for view in load.views] == ["old"]
    assert (load.rows, load.waiting, load.starting) == (12, 5, 0)


def test_ingresses_add_up_and_replicas_repeat_them() -> None:
    one, two = (Demand(name, 3, 1.0, 100.0, 50.0) for name in ("i1", "i2"))
    samples = {"r0": sample(0, 1, one, two), "r1": sample(1, 1, one)}
    load = load_of(samples, 2, POOL)
    assert (load.waiting, load.requests_per_s, load.output_tokens_per_s) == (6, 2.0, 100.0)

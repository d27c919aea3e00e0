"""The autoscaler on loads written down by hand."""

from math import inf

import pytest

from service.routing.autoscale import Autoscaler, Bounds, Load, Offered, step_ms
from service.routing.cost import StepModel
from service.routing.policy import ReplicaView

MODEL = StepModel(16.0, 0.03, 0.02, 0.03)
BOUNDS = Bounds(minimum=1, maximum=8, tpot_ms=25.0, hold_s=20.0, cold_start_s=30.0)


def views(*rows: int) -> list[ReplicaView]:
    return [ReplicaView(f"r{i}", i, MODEL, 512, 512, rows=count) for i, count in enumerate(rows)]


def over(scaler: Autoscaler, load: Load, seconds: int) -> int:
    """What it wants after so many seconds of one load, asked every two."""
    return [scaler.desired(float(now_s), load) for now_s in range(0, seconds + 1, 2)][-1]


def test_no_requests_mean_no_load():
    assert over(Autoscaler(BOUNDS), Load(views(0, 0, 0)), 18) == 3, "held"
    assert over(Autoscaler(BOUNDS), Load(views(0, 0, 0)), 20) == 2, "one at a time"
    assert over(Autoscaler(BOUNDS), Load(views(0)), 100) == 1, "the minimum"


def test_another_replica_before_the_margin_is_passed():
    # 22.5 ms at 130 rows.
    assert Autoscaler(BOUNDS).desired(0.0, Load(views(129))) == 1
    assert Autoscaler(BOUNDS).desired(0.0, Load(views(131))) == 2
    assert Autoscaler(BOUNDS).desired(0.0, Load(views(131), starting=1)) == 2, "one is on its way"
    assert Autoscaler(BOUNDS).desired(0.0, Load(views(100), waiting=400)) == 4
    assert Autoscaler(BOUNDS).desired(0.0, Load(views(5000))) == 8, "the maximum"


def test_offered_tokens_count_even_when_requests_are_turned_away():
    """8 requests a second of 800 tokens: 6,400 tokens/s need 150 rows of one replica by Little's law."""
    load = Load(views(10), requests_per_s=8.0, output_tokens_per_s=6400.0)
    assert step_ms(load, 1) == pytest.approx(16 / (1 - 0.05 * 6.4))
    assert Autoscaler(BOUNDS).desired(0.0, load) == 2


def test_an_empty_victim_goes_at_the_margin_and_a_busy_one_only_with_room():
    # 100 rows on one replica: 21 ms, over 0.8 of the SLO and under 0.9 of it.
    assert over(Autoscaler(BOUNDS), Load(views(100, 0)), 20) == 1
    assert over(Autoscaler(BOUNDS), Load(views(50, 50)), 100) == 2
    assert over(Autoscaler(BOUNDS), Load(views(30, 30)), 20) == 1


def test_load_that_comes_back_resets_the_wait():
    scaler = Autoscaler(BOUNDS)
    over(scaler, Load(views(30, 30)), 18)
    assert scaler.desired(20.0, Load(views(120, 120))) == 2
    assert scaler.desired(22.0, Load(views(30, 30))) == 2
    assert scaler.desired(40.0, Load(views(30, 30))) == 2
    assert scaler.desired(42.0, Load(views(30, 30))) == 1


def test_growth_is_met_before_it_arrives():
    """Requests double in 20 s; a start takes 30: what is enough now is not enough then."""
    scaler, wanted = Autoscaler(BOUNDS), []
    for now_s in range(0, 22, 2):
        rate = 3.0 + 0.15 * now_s
        load = Load(views(60), requests_per_s=rate, output_tokens_per_s=800 * rate)
        wanted.append(scaler.desired(float(now_s), load))
    steady = Load(views(60), requests_per_s=6.0, output_tokens_per_s=4800.0)
    assert Autoscaler(BOUNDS).desired(0.0, steady) == 1
    assert wanted[-1] == 2


def test_rates_of_offered_requests():
    offered = Offered(window_s=15.0)
    for second in range(1, 201):
        for _ in range(4):
            offered.note(100, 50)
        rates = offered.rates(float(second))
    assert rates == pytest.approx((4.0, 400.0, 200.0), rel=1e-3)


def test_places_count_beside_time():
    """Seven requests on eight places want a second replica, however fast the first is."""
    views = [ReplicaView("r0", 0, MODEL, 8, 512, rows=7)]
    assert step_ms(Load(views), 1) < inf
    views[0].rows = 8
    assert step_ms(Load(views), 1) == inf
    assert step_ms(Load(views), 2) < 25
    offered = Load([ReplicaView("r0", 0, MODEL, 8, 512)], output_tokens_per_s=600.0)
    assert step_ms(offered, 1) == inf, "600 tokens a second in steps of 17 ms are ten rows"

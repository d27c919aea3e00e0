"""The policy's promises, on random fleets, and what it costs to decide."""

import time
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.routing.baselines import LeastLoaded, PowerOfTwo
from service.routing.cost import StepModel
from service.routing.policy import (
    AFFINITY_MS,
    Ask,
    PackSpill,
    Reason,
    ReplicaView,
    cannot_take,
    predicted_tpot_ms,
    predicted_ttft_ms,
)

H200 = StepModel(16.0, 0.0302, 0.0182, 0.03, 0.0315)
WITHOUT_LOG = replace(H200, state_ms=0.0315, write_through_state_ms=None)
ASK = Ask(prompt_tokens=512, output_tokens=200, tpot_ms=25.0, ttft_ms=1000.0)
AUTO, BALANCED, PACKED = PackSpill("auto"), PackSpill(0.0), PackSpill(1.0)

policies = st.sampled_from([AUTO, BALANCED, PACKED, PackSpill(0.5)])
views = st.builds(
    ReplicaView,
    replica=st.just(""),
    order=st.integers(0, 99),
    model=st.sampled_from([H200, WITHOUT_LOG]),
    rows_limit=st.integers(1, 300),
    chunk_tokens=st.just(512),
    ready=st.booleans(),
    rows=st.integers(0, 300),
    prefill_tokens=st.integers(0, 40_000),
    prefill_per_step=st.floats(0, 512),
    free_tokens=st.floats(0, 1e6),
    strictest_tpot_ms=st.sampled_from([inf, 30.0, 20.0]),
)
asks = st.builds(
    Ask,
    prompt_tokens=st.integers(1, 8000),
    output_tokens=st.integers(1, 2000),
    tpot_ms=st.sampled_from([inf, 25.0, 40.0]),
    ttft_ms=st.sampled_from([inf, 1000.0, 200.0]),
    waited_ms=st.floats(0, 500),
)


@st.composite
def fleets(draw: st.DrawFn) -> list[list[ReplicaView]]:
    pools = draw(st.lists(st.lists(views, max_size=6), min_size=1, max_size=3))
    orders = iter(draw(st.permutations(range(sum(map(len, pools))))))
    return [[replace(view, replica=f"{p}-{i}", order=next(orders)) for i, view in enumerate(pool)]
            for p, pool in enumerate(pools)]  # fmt: skip


def feasible(policy: PackSpill, view: ReplicaView, ask: Ask) -> bool:
    """Written out again, from the docstrings."""
    return (
        cannot_take(view, ask) is None
        and predicted_tpot_ms(view, ask) <= policy.margin * min(ask.tpot_ms, view.strictest_tpot_ms)
        and predicted_ttft_ms(view, ask) <= policy.margin * ask.ttft_ms
    )


@given(policies, fleets(), asks)
def test_a_feasible_replica_of_the_first_pool_that_has_one(policy, pools, ask):
    decision = policy.choose(pools, ask)
    able = [[view.replica for view in pool if feasible(policy, view, ask)] for pool in pools]
    first = next((index for index, names in enumerate(able) if names), None)
    if first is None:
        # An empty one that could hold it is as fast as it gets.
        empty = [
            [view.replica for view in pool if not view.rows and cannot_take(view, ask) is None]
            for pool in pools
        ]
        rank = next((index for index, names in enumerate(empty) if names), None)
        assert decision.replica in ([None] if rank is None else empty[rank])
        assert decision.refused.keys() == {view.replica for pool in pools for view in pool}
    else:
        assert decision.replica in able[first]
        assert decision.spilled == (first > 0)
        assert not decision.refused.keys() & set(able[first])


@given(policies, fleets(), asks)
def test_equal_views_give_equal_decisions(policy, pools, ask):
    again = [[replace(view) for view in reversed(pool)] for pool in pools]
    assert policy.choose(pools, ask).replica == policy.choose(again, ask).replica


@given(policies, fleets(), asks, st.data())
def test_more_load_makes_nothing_possible_and_predictions_no_lower(policy, pools, ask, data):
    before = policy.choose(pools, ask)
    view = data.draw(st.sampled_from([view for pool in pools for view in pool] or [None]))
    if view is None:
        return
    tpot, ttft = predicted_tpot_ms(view, ask), predicted_ttft_ms(view, ask)
    view.rows += data.draw(st.integers(1, 50))
    view.prefill_tokens += data.draw(st.integers(0, 5000))
    assert predicted_tpot_ms(view, ask) >= tpot
    assert predicted_ttft_ms(view, ask) >= ttft
    after = policy.choose(pools, ask)
    assert before.replica is not None or after.replica is None


def fleet(*rows: int, **others) -> list[ReplicaView]:
    return [ReplicaView(f"r{i}", i, H200, 512, 512, rows=count, **others) for i, count in enumerate(rows)]


def test_packing_fills_the_oldest_replica_up_to_its_margin():
    # 22.5 ms = 16 + 0.0484 rows + 0.03 * 512 / 128.
    most = int((22.5 - 16 - 0.12) / 0.0484)
    assert PACKED.choose([fleet(most - 1, 3, 0)], ASK).replica == "r0"
    assert PACKED.choose([fleet(most, 3, 0)], ASK).replica == "r1"
    opened = PACKED.choose([fleet(most, most, 0)], ASK)
    assert (opened.replica, opened.reason) == ("r2", Reason.OPEN)
    full = PACKED.choose([fleet(most, most)], ASK)
    assert full.replica is None
    assert set(full.refused.values()) == {Reason.TPOT}


def test_balancing_takes_the_shortest_step():
    assert BALANCED.choose([fleet(9, 4, 6)], ASK).replica == "r1"
    assert BALANCED.choose([fleet(9, 4, 0)], ASK).replica == "r2"


def test_auto_packs_below_the_break_even_batch_and_balances_above():
    even = H200.break_even_rows
    assert AUTO.choose([fleet(even - 1, 0)], ASK).replica == "r0"
    assert AUTO.choose([fleet(even, 0)], ASK).replica == "r1"
    assert AUTO.choose([fleet(even, even - 1)], ASK).replica == "r1"
    assert AUTO.choose([fleet(even + 9, even + 4)], ASK).replica == "r1"


def test_break_even_is_where_a_step_gets_three_percent_shorter():
    rows = H200.break_even_rows
    assert H200.step_ms(rows) <= 0.97 * WITHOUT_LOG.step_ms(rows)
    assert H200.step_ms(rows - 1) > 0.97 * WITHOUT_LOG.step_ms(rows - 1)
    assert WITHOUT_LOG.break_even_rows == 1
    assert replace(H200, state_ms=0.0314).break_even_rows == 1, "never: there is no batch to pack up to"


def test_a_cached_prefix_counts_when_it_saves_enough():
    enough, little = {"r1": AFFINITY_MS}, {"r1": AFFINITY_MS - 1}
    assert PACKED.choose([fleet(3, 3)], replace(ASK, saved_ms=enough)).replica == "r1"
    assert PACKED.choose([fleet(3, 3)], replace(ASK, saved_ms=little)).replica == "r0"
    over = fleet(3, 500)
    assert PACKED.choose([over], replace(ASK, saved_ms=enough)).replica == "r0", "the SLO comes first"


def test_the_strictest_promise_on_a_replica_holds_for_who_joins():
    relaxed = replace(ASK, tpot_ms=100.0)
    assert PACKED.choose([fleet(200, 1)], relaxed).replica == "r0"
    held = fleet(200, 1, strictest_tpot_ms=25.0)
    assert PACKED.choose([held], relaxed).replica == "r1"


def test_two_pools_under_constant_load_do_not_take_turns():
    """100 requests that each leave and come again: the second pool gets one only when the first is full."""
    first, second = fleet(0, 0), [ReplicaView("s0", 9, H200, 512, 512)]
    first[0].rows_limit = first[1].rows_limit = 30
    held = {view.replica: view for view in [*first, *second]}
    where: list[str] = []
    for turn in range(1000):
        if len(where) == 100:
            held[where.pop(turn * 37 % 100)].rows -= 1
        decision = AUTO.choose([first, second], ASK)
        assert decision.spilled == (first[0].rows == first[1].rows == 30)
        assert decision.replica is not None
        held[decision.replica].rows += 1
        where.append(decision.replica)


def test_a_decision_says_why():
    [busy, idle] = fleet(500, 0)
    text = str(PACKED.choose([[busy], [idle]], ASK))
    assert text == "r1 (spill, open, TPOT 16.2 ms, TTFT 31 ms); refused r0: TPOT over its margin"
    assert str(PACKED.choose([[busy]], ASK)) == "wait; refused r0: TPOT over its margin"


@pytest.mark.parametrize("policy", [AUTO, BALANCED, PACKED, LeastLoaded(), PowerOfTwo()])
def test_a_decision_takes_less_than_200_microseconds_for_64_replicas(policy):
    pools = [fleet(*(40 + i % 7 for i in range(64)), prefill_tokens=300, prefill_per_step=50.0)]

    def once() -> float:
        start = time.perf_counter()
        assert policy.choose(pools, ASK).replica is not None
        return time.perf_counter() - start

    # The fastest of many: others use this machine too.
    assert min(once() for _ in range(300)) < 200e-6

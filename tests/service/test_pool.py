"""Router and pools over replicas that are played: who is asked, in what order, and what the client gets."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import RayActorError

from service.api import router as routers
from service.api.pool import Pool, UnansweredError
from service.api.router import Router, Wanted
from service.engine.protocol import Answer, Call, EngineLoad, Message, Report, Usage
from service.errors import engine_dead, pool_full
from service.pools import PoolConfig, Slo, StepCost
from service.routing.cost import StepModel
from service.routing.policy import Ask, PackSpill

SERVED = [None, Answer(200, "{}"), Usage(3, 5)]
DEAD = [Answer.of(engine_dead())]
FULL = [Answer.of(pool_full(2))]
MODEL = StepModel(10.0, 0.1, 0.0, 0.01)


class Played(Pool):
    """A pool whose replicas are played: `play` says what one answers, and is told what was asked."""

    def __init__(self, config: PoolConfig, play: Callable[[str, Call], Any], replicas: int = 2) -> None:
        super().__init__(config, None, "ingress")  # type: ignore[arg-type]
        self.asked: list[str] = []
        self.patience_s: list[float] = []
        self._play = play
        self.report(*((f"{config.name}{index}", True, 0) for index in range(replicas)))

    def report(self, *replicas: tuple[str, bool, int]) -> None:
        """Name, whether it lives, and the requests that it holds."""
        load = EngineLoad(0, 0.0, MODEL)
        reports = [
            Report(name, order, alive, rows, load) for order, (name, alive, rows) in enumerate(replicas)
        ]
        self._take_over(reports, 0.0)

    async def ask(self, call: Call, patience_s: float) -> Any:
        assert call.replica is not None
        self.asked.append(call.replica)
        self.patience_s.append(patience_s)
        for message in self._play(call.replica, call):
            if isinstance(message, BaseException):
                raise message
            if isinstance(message, asyncio.Event):
                await message.wait()
            else:
                yield message


def config(name: str = "a", **settings: Any) -> PoolConfig:
    return PoolConfig(**{"name": name, "model": "m", "replicas": 2, "max_concurrent_requests": 2} | settings)


def promised(tpot_ms: float, ttft_ms: float, prefill_token_ms: float = 0.01) -> dict[str, Any]:
    """An SLO, and steps of 10 ms and 0.1 ms a row to keep it by."""
    cost = StepCost(fixed_ms=10, row_ms=0.1, state_ms=0, prefill_token_ms=prefill_token_ms)
    return {"slo": Slo(tpot_ms=tpot_ms, ttft_ms=ttft_ms), "cost": cost}


def answers_after(gate: asyncio.Event) -> Callable[[str, Call], Any]:
    """A replica that accepts at once and answers when the gate opens."""
    return lambda *_: [None, gate, *SERVED[1:]]


def router(*pools: Pool, queued: int = 0) -> Router:
    return Router(list(pools), PackSpill(), queued)


async def answer(router: Router, wanted: Wanted | None = None) -> tuple[Answer, dict[str, Any]]:
    record: dict[str, Any] = {}
    messages: list[Message] = [
        message
        async for message in router.answer(Call("completion", {}, "id"), wanted or Wanted(10, 5), record)
    ]
    assert isinstance(messages[0], Answer)
    return messages[0], record


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "FULL_PERIOD_S", 0.001)


@pytest.mark.asyncio
async def test_a_replica_whose_engine_is_dead_is_passed_over_until_it_reports_again() -> None:
    pool = Played(config(), lambda replica, _: DEAD if replica == "a0" else SERVED)
    for _ in range(3):
        reply, record = await answer(router(pool))
        assert (reply.status, record["outcome"]) == (200, "ok")
    assert pool.asked == ["a0", "a1", "a1", "a1"]


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["dead", "lost"])
async def test_a_request_that_is_lost_after_it_was_taken_is_tried_once_more(how: str) -> None:
    lost = [None, *DEAD] if how == "dead" else [None, RayActorError()]
    pool = Played(config(), lambda replica, _: lost if replica == "a0" else SERVED)
    reply, record = await answer(router(pool))
    assert (reply.status, pool.asked) == (200, ["a0", "a1"])
    assert record["tried_again"]
    pool = Played(config(replicas=3), lambda *_: lost, replicas=3)
    reply, record = await answer(router(pool))
    assert (reply.status, pool.asked) == (503, ["a0", "a1"])
    assert reply.code in ("engine_dead", "replica_lost")
    assert record["outcome"] == "error"


@pytest.mark.asyncio
async def test_a_frozen_replica_is_passed_over() -> None:
    pool = Played(config(), lambda replica, _: [UnansweredError()] if replica == "a0" else SERVED)
    reply, record = await answer(router(pool))
    assert (reply.status, record["tried_again"], pool.asked) == (200, True, ["a0", "a1"])


@pytest.mark.asyncio
async def test_dead_engines_alone_are_not_asked_for_long() -> None:
    pool = Played(config(), lambda *_: DEAD)
    reply, record = await answer(router(pool))
    assert (reply.status, reply.code, pool.asked) == (503, "not_ready", ["a0", "a1"])
    assert record["outcome"] == "rejected"


@pytest.mark.asyncio
async def test_what_others_have_filled_spills_to_the_next_pool_and_says_so() -> None:
    first = Played(config("a"), lambda *_: FULL)
    second = Played(config("b"), lambda *_: SERVED)
    reply, record = await answer(router(first, second))
    assert reply.status == 200
    assert (record["pool"], record["served_by"], record["spilled"]) == ("b", "b0", True)
    assert first.asked == ["a0", "a1"], "each was asked once, and is full until it reports"
    assert "a0: no row free; a1: no row free" in record["route"]


@pytest.mark.asyncio
async def test_own_dispatches_correct_a_report() -> None:
    """Requests that are on their way when a report comes are not in it."""
    gate = asyncio.Event()
    pool = Played(config(), answers_after(gate))
    one = router(pool)
    asked = [asyncio.create_task(answer(one)) for _ in range(4)]
    await asyncio.sleep(0.01)
    assert Counter(pool.asked) == {"a0": 2, "a1": 2}
    pool.report(("a0", True, 0), ("a1", True, 0))
    assert [view.rows for view in pool.views.values()] == [2, 2]
    reply, record = await answer(one)
    assert (reply.status, record["outcome"]) == (429, "rejected")
    gate.set()
    assert [reply.status for reply, _ in await asyncio.gather(*asked)] == [200] * 4
    assert [view.rows for view in pool.views.values()] == [0, 0]


@pytest.mark.asyncio
async def test_who_waits_goes_by_priority_then_by_arrival() -> None:
    gates = {number: asyncio.Event() for number in range(4)}
    order: list[str] = []
    numbers = iter(range(4))

    def play(_: str, call: Call) -> list[Any]:
        order.append(call.request_id)
        return [None, gates[next(numbers)], *SERVED[1:]]

    pool = Played(config(replicas=1, max_concurrent_requests=1), play, replicas=1)
    one = router(pool, queued=3)

    async def ask(name: str, priority: int) -> int:
        messages = one.answer(Call("completion", {}, name), Wanted(10, 5, priority), {})
        (reply, *_) = [message async for message in messages]
        assert isinstance(reply, Answer)
        return reply.status

    asked = []
    for name, priority in [("runs", 0), ("low", 5), ("first", 1), ("second", 1)]:
        asked.append(asyncio.create_task(ask(name, priority)))
        await asyncio.sleep(0.001)
    assert await ask("too many", 0) == 429
    for gate in gates.values():
        gate.set()
        await asyncio.sleep(0.01)
    assert await asyncio.gather(*asked) == [200] * 4
    assert order == ["runs", "first", "second", "low"]


@pytest.mark.asyncio
async def test_who_leaves_the_queue_lets_the_next_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "ACCEPT_TIMEOUT_S", 0.05)
    gate = asyncio.Event()
    pool = Played(config(replicas=1, max_concurrent_requests=1), answers_after(gate), replicas=1)
    one = router(pool, queued=2)
    runs = asyncio.create_task(answer(one))
    await asyncio.sleep(0.001)
    leaves = asyncio.create_task(answer(one))
    await asyncio.sleep(0.001)
    late = asyncio.create_task(answer(one))
    await asyncio.sleep(0.001)
    leaves.cancel()
    reply, record = await late
    assert (reply.status, record["outcome"]) == (429, "rejected")
    assert int(reply.retry_after_s or 0) >= 1
    gate.set()
    assert (await runs)[0].status == 200
    assert not one._line._entries
    assert one._held == 0
    assert (await answer(one))[0].status == 200


@pytest.mark.asyncio
async def test_requests_wait_where_the_slo_leaves_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a margin of 0.9, two rows take 10.2 ms of 11.4; three would still, a fourth 10.4 > 10.3."""
    slo = promised(tpot_ms=11.45, ttft_ms=60.0)
    gate = asyncio.Event()
    pool = Played(
        config(replicas=1, max_concurrent_requests=8, **slo),
        answers_after(gate),
        replicas=1,
    )
    one = router(pool)
    asked = [asyncio.create_task(answer(one)) for _ in range(4)]
    replies = [reply.status for reply, _ in await asyncio.gather(*asked[3:])]
    assert replies == [429]
    gate.set()
    assert [reply.status for reply, _ in await asyncio.gather(*asked[:3])] == [200] * 3


@pytest.mark.asyncio
async def test_a_share_is_kept_and_spills_like_the_rest() -> None:
    first = Played(config("a"), lambda *_: SERVED)
    second = Played(config("b", share=0.25), lambda *_: SERVED)
    one = router(first, second)
    pools = Counter([(await answer(one))[1]["pool"] for _ in range(200)])
    assert pools == {"a": 150, "b": 50}
    second.report(("b0", False, 0))
    pools = Counter([(await answer(one))[1]["pool"] for _ in range(40)])
    assert pools == {"a": 40}


@pytest.mark.asyncio
@pytest.mark.parametrize("last_seen_alive", [True, False])
async def test_without_reports_serve_picks(monkeypatch: pytest.MonkeyPatch, last_seen_alive: bool) -> None:
    pool = Played(config(), lambda *_: SERVED)
    pool.report(("a0", last_seen_alive, 0))
    monkeypatch.setattr(Pool, "stale", property(lambda _: True))
    asked = []

    async def ask(call: Call, patience_s: float) -> Any:
        asked.append(call.replica)
        for message in SERVED:
            yield message

    monkeypatch.setattr(pool, "ask", ask)
    reply, record = await answer(router(pool))
    assert (reply.status, asked) == (200, [None])
    assert "no view" in record["route"]


@pytest.mark.asyncio
async def test_a_prompt_goes_where_its_beginning_is() -> None:
    """As long as that saves more than balance costs, and the replica has room."""
    start = "".join(random.choice("abc ") for _ in range(9000))
    one = router(pool := Played(config(max_concurrent_requests=8), lambda *_: SERVED))

    async def to(text: str) -> str:
        await answer(one, Wanted(2500, 5, prompt=text))
        return pool.asked[-1]

    assert await to(start) == "a0"
    pool.report(("a0", True, 5), ("a1", True, 0))
    assert await to("x" + start[1:]) == "a1", "another beginning goes to the emptier one"
    assert await to(start + " And now something else.") == "a0"
    pool.report(("a0", True, 8), ("a1", True, 0))
    assert await to(start) == "a1"
    uncached = config(engine_args={"enable_prefix_caching": False})
    one = router(pool := Played(uncached, lambda *_: SERVED))
    await to(start)
    pool.report(("a0", True, 1), ("a1", True, 0))
    assert await to(start) == "a1"


@pytest.mark.asyncio
async def test_what_is_too_large_does_not_keep_back_what_fits() -> None:
    """A prompt that no replica can take in time while others run waits; shorter ones behind it go on, and its
    own time ends."""
    slo = promised(tpot_ms=50.0, ttft_ms=400.0)
    gate = asyncio.Event()
    pool = Played(config(max_concurrent_requests=8, **slo), answers_after(gate))
    one = router(pool)
    running = [asyncio.create_task(answer(one)) for _ in range(2)]
    await asyncio.sleep(0.01)
    large = asyncio.create_task(answer(one, Wanted(60_000, 5)))
    await asyncio.sleep(0.01)
    small = [asyncio.create_task(answer(one)) for _ in range(4)]
    await asyncio.sleep(0.01)
    assert len(pool.asked) == 6, "the large one waits, the four small ones do not"
    reply, record = await large
    assert reply.status == 429
    assert "TTFT over its margin" in record["route"]
    gate.set()
    assert [reply.status for reply, _ in await asyncio.gather(*running, *small)] == [200] * 6
    reply, record = await answer(one, Wanted(60_000, 5))
    assert (reply.status, "empty" in record["route"]) == (200, True), "nothing would be faster"


@pytest.mark.asyncio
async def test_what_ended_since_a_report_was_asked_for_is_not_counted() -> None:
    pool = Played(config(), lambda *_: SERVED)
    one = router(pool)
    asked_at_s = time.monotonic()
    pool._take_over([], asked_at_s)
    pool.report(("a0", True, 0), ("a1", True, 0))
    first = pool.sent(Ask(10, 5), "a0")
    first.at_s = asked_at_s - 1
    pool.ended(first)
    load = EngineLoad(0, 0.0, MODEL)
    pool._take_over([Report("a0", 0, True, 2, load)], asked_at_s)
    assert pool.views["a0"].rows == 1
    assert (await answer(one))[0].status == 200


@pytest.mark.asyncio
async def test_tokenizing_is_no_generation() -> None:
    pool = Played(
        config(**promised(20, 10, prefill_token_ms=1)), lambda *_: [None, Answer(200, "{}"), Usage(0, 0)]
    )
    one = router(pool)
    reply, _ = await answer(one, Wanted(100_000, None, generates=False))
    assert reply.status == 200
    assert one._mean_output_tokens == 256
    assert pool.offered.requests == 0


@pytest.mark.asyncio
async def test_many_that_are_too_large_keep_nobody_back() -> None:
    """More of them than one round of the line tries, and in front by their priority."""
    slo = promised(tpot_ms=50.0, ttft_ms=400.0)
    gate = asyncio.Event()
    gate.set()
    pool = Played(config(max_concurrent_requests=200, **slo), answers_after(gate))
    one = router(pool)
    hold = [pool.sent(Ask(1, 1), name) for name in ("a0", "a1")]
    large = [asyncio.create_task(answer(one, Wanted(60_000, 5, -1))) for _ in range(100)]
    await asyncio.sleep(0.01)
    small = [asyncio.create_task(answer(one)) for _ in range(5)]
    for _ in range(40):
        one._line.wake()
        await asyncio.sleep(0.005)
    assert len(pool.asked) == 5, "within 0.36 s, when the large ones are refused"
    assert [reply.status for reply, _ in await asyncio.gather(*small)] == [200] * 5
    assert {reply.status for reply, _ in await asyncio.gather(*large)} == {429}
    assert len(hold) == 2


@pytest.mark.asyncio
async def test_who_waits_goes_on_waiting_while_replicas_are_replaced() -> None:
    gate = asyncio.Event()
    pool = Played(config(replicas=1, max_concurrent_requests=1), answers_after(gate), replicas=1)
    one = router(pool, queued=2)
    runs = asyncio.create_task(answer(one))
    await asyncio.sleep(0.01)
    waits = asyncio.create_task(answer(one))
    await asyncio.sleep(0.01)
    pool.report(("a0", False, 0))
    one._line.wake()
    await asyncio.sleep(0.01)
    assert not waits.done()
    assert (await answer(one))[0].status == 503, "who comes now is told so at once"
    gate.set()
    pool.report(("new", True, 0))
    one._line.wake()
    assert (await waits)[0].status == 200
    assert pool.asked[-1] == "new"
    assert (await runs)[0].status == 200


@pytest.mark.asyncio
async def test_a_frozen_pool_leaves_time_for_the_next() -> None:
    slo = promised(tpot_ms=50, ttft_ms=1000, prefill_token_ms=0)
    frozen = Played(config(**slo), lambda *_: [UnansweredError()])
    second = Played(config("b", **slo), lambda *_: SERVED)
    reply, record = await answer(router(frozen, second))
    assert (reply.status, record["pool"]) == (200, "b")
    assert frozen.asked == ["a0", "a1"]
    assert frozen.patience_s[0] == pytest.approx(0.45, abs=0.01), "half of 0.9 of the TTFT"

"""Several pools and models behind one API, on real Ray Serve with simulated engines."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from load import Stream, all_ended, body, open_streams
from running_service import RunningService, running, simulated
from waiting import until

from service.metrics.requests import REQUESTS
from service.metrics.routing import SPILLED, UNROUTED

SIM = {"fixed_ms": 20, "per_row_ms": 0, "per_prefill_token_ms": 0, "max_rows": 1000}
PLACES = 4


def pool(name: str, **settings: Any) -> dict[str, Any]:
    return {
        "name": name,
        "model": "simulated",
        "served_model_name": "demo",
        "cpus_per_replica": 0.25,
        "max_concurrent_requests": PLACES,
        "sim": SIM,
    } | settings


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """`demo` on two pools, and `ab` on a pair of which one has a share."""
    pools = [
        pool("first"),
        pool("second", replicas=2, max_concurrent_requests=64),
        pool("ab-on", served_model_name="ab", max_concurrent_requests=64),
        pool("ab-off", served_model_name="ab", max_concurrent_requests=64, share=0.25),
    ]
    with running(simulated(20, pools=pools), tmp_path_factory.mktemp("pools")) as service:
        yield service


def by_pool(service: RunningService, **labels: str) -> Counter[str]:
    counted: Counter[str] = Counter()
    for of, value in service.scrape().samples[REQUESTS.prom_name]:
        if labels.items() <= of.items():
            counted[of["pool"]] += int(value)
    return counted


def streams(service: RunningService, number: int, tokens: int, **headers: str) -> list[Stream]:
    async def run() -> list[Stream]:
        opened = await open_streams(service.config["port"], [body(tokens)] * number, **headers)
        await all_ended(opened, 60)
        return opened

    return asyncio.run(run())


def routes(streams: list[Stream]) -> list[str]:
    """What each was told of where it went."""
    return [stream.head.partition(b"x-deltalog-route: ")[2].split(b"\r\n")[0].decode() for stream in streams]


def test_each_model_has_its_pools(pooled: RunningService) -> None:
    models = httpx.get(f"{pooled.url}/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["demo", "ab"]
    for model in ("demo", "ab"):
        answer = pooled.post("completions", {"model": model, "prompt": "x", "max_tokens": 2})
        assert (answer.status_code, answer.json()["model"]) == (200, model)
        assert "x-deltalog-route" not in answer.headers


def test_a_full_pool_spills_to_the_next_and_says_so(pooled: RunningService) -> None:
    before = pooled.settled()
    done = streams(pooled, PLACES + 6, 100, x_deltalog_debug="1")
    assert all(stream.done for stream in done)
    spilled = [route for route in routes(done) if "spill" in route]
    assert len(spilled) == 6
    assert all("no row free" in route for route in spilled)
    after = pooled.settled()
    assert after.total(SPILLED, pool="second") - before.total(SPILLED, pool="second") == 6
    assert after.total(UNROUTED) == before.total(UNROUTED)


def test_the_replicas_of_a_pool_are_balanced(pooled: RunningService) -> None:
    done = streams(pooled, PLACES + 20, 100, x_deltalog_debug="1")
    spread = Counter(route.split(" ")[0] for route in routes(done) if "spill" in route)
    assert sorted(spread.values()) == [10, 10]


def test_a_pool_dies_and_its_traffic_moves(pooled: RunningService) -> None:
    (victim,) = pooled.processes("ServeReplica:deltalog:first")
    pooled.settled()
    before = by_pool(pooled, outcome="ok")
    os.kill(victim, signal.SIGKILL)
    for _ in range(20):
        assert pooled.post("completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    until(
        lambda: by_pool(pooled, outcome="ok").total() == before.total() + 20, 20, "all twenty to be counted"
    )
    assert by_pool(pooled, outcome="ok")["second"] > before["second"]
    until(lambda: victim not in pooled.processes("ServeReplica:deltalog:first"), 30, "it to be gone")
    until(lambda: pooled.processes("ServeReplica:deltalog:first"), 60, "it to be replaced")

    def back() -> bool:
        answer = httpx.post(
            f"{pooled.url}/v1/completions",
            json={"model": "demo", "prompt": "x", "max_tokens": 1},
            headers={"x-deltalog-debug": "1"},
            timeout=30,
        )
        return "spill" not in answer.headers["x-deltalog-route"]

    until(back, 60, "the first pool to take requests again")


def test_a_share_of_a_quarter_gets_a_quarter(pooled: RunningService) -> None:
    pooled.settled()
    before = by_pool(pooled, outcome="ok")

    async def run() -> None:
        for _ in range(20):
            opened = await open_streams(pooled.config["port"], [body(1) | {"model": "ab"}] * 50)
            await all_ended(opened, 60)
            assert all(stream.done for stream in opened)

    asyncio.run(run())
    until(lambda: (by_pool(pooled, outcome="ok") - before).total() == 1000, 30, "all to be counted")
    share = (by_pool(pooled, outcome="ok") - before)["ab-off"] / 1000
    assert share == pytest.approx(0.25, abs=0.03)


def test_a_priority_that_is_none(pooled: RunningService) -> None:
    answer = httpx.post(
        f"{pooled.url}/v1/completions",
        json={"model": "demo", "prompt": "x"},
        headers={"x-deltalog-priority": "high"},
    )
    assert answer.status_code == 400
    assert "expected a whole number" in answer.json()["error"]["message"]


def test_two_ingresses_do_not_overshoot(tmp_path: Path) -> None:
    """Reports of half a second ago let both ingresses believe in one room; a replica keeps its limit, and
    what it refuses is served where there is room, or later."""
    config = simulated(20, pools=[pool("only", replicas=2)], ingress_replicas=2, max_queued_requests=40)
    with running(config, tmp_path):

        async def run() -> tuple[list[Stream], int]:
            opened = await open_streams(config["port"], [body(50)] * 40)
            most = 0
            while not all(stream.ended.done() for stream in opened):
                most = max(most, sum(bool(s.events) and not s.ended.done() for s in opened))
                await asyncio.sleep(0.01)
            return opened, most

        opened, most = asyncio.run(run())
        assert Counter(stream.status for stream in opened) == {200: 40}
        # A stream that the replica has ended may be seen to run for a moment.
        assert 2 * PLACES <= most <= 2 * PLACES + 2

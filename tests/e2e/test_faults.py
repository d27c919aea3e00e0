"""Faults under load, on real Ray Serve with simulated engines: two ingresses, two replicas of 32 places.

After each fault every request that was accepted has exactly one outcome, and the next request is served.
"""

import asyncio
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import yaml
from load import Stream, all_ended, body, open_streams, reached
from running_service import RunningService, running, simulated
from waiting import until

from service.metrics.requests import OUTCOMES, REQUESTS, RUNNING_REQUESTS

STEP_S = 0.02
REPLICAS, PLACES = 2, 32
CAPACITY = REPLICAS * PLACES
REQUEST = b'{"model": "demo", "prompt": "x", "stream": true, "max_tokens": 30000}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n" % len(REQUEST)
REPLICA, INGRESS = "ServeReplica:deltalog:test", "ServeReplica:deltalog:ingress"


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    config = simulated(STEP_S * 1000, ingress_replicas=2)
    with running(config, tmp_path_factory.mktemp("faults")) as service:
        yield service


@dataclass
class Accounts:
    """Outcomes of every request so far. What is counted once too often shows at the next look."""

    service: RunningService
    expected: Counter[str] = field(default_factory=Counter)

    def close(self, **new: int) -> None:
        """Wait until exactly these outcomes have come, and nothing runs."""
        self.expected.update(new)
        until(lambda: self.counted() == self.expected, 30, f"{self.expected}, got {self.counted()}")
        until(lambda: self.service.scrape().total(RUNNING_REQUESTS) == 0, 30, "the engines to be idle")

    def counted(self) -> Counter[str]:
        scrape = self.service.scrape()
        return +Counter({name: int(scrape.total(REQUESTS, outcome=name)) for name in OUTCOMES})


@pytest.fixture(scope="module")
def books(faulty: RunningService) -> Accounts:
    return Accounts(faulty)


@pytest.fixture(scope="module")
def half_a_request(faulty: RunningService) -> Iterator[socket.socket]:
    """A client that sends half a request and then nothing, from the first test on."""
    with socket.create_connection(("127.0.0.1", faulty.config["port"])) as client:
        client.sendall(HEAD + REQUEST[:40])
        yield client


@pytest.fixture
def accounts(faulty: RunningService, books: Accounts, half_a_request: socket.socket) -> Iterator[Accounts]:
    """The fault is over when the service is whole again: the next request is served, all places are free."""
    until(lambda: len(faulty.processes(REPLICA)) == REPLICAS, 60, "both replicas to run")
    yield books
    assert faulty.post("completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
    books.expected["ok"] += 1

    def whole() -> bool:
        answers = Counter(stream.status for stream in asyncio.run(fill(faulty)))
        books.expected.update(ok=answers[200], rejected=CAPACITY - answers[200])
        return answers[200] == CAPACITY

    until(whole, 90, "all places to be free", period_s=1)


async def fill(service: RunningService) -> list[Stream]:
    """As many requests as the service has places."""
    streams = await open_streams(service.config["port"], [body(20)] * CAPACITY)
    await all_ended(streams, 60)
    return streams


def with_streams(
    service: RunningService, number: int, tokens: int, fault: Callable[[list[Stream]], Any], **options: Any
) -> list[Stream]:
    """Streams with a fault once each has had its first token, to their ends."""

    async def run() -> list[Stream]:
        streams = await open_streams(service.config["port"], [body(tokens, **options)] * number)
        await reached(lambda: all(stream.events for stream in streams), 60, "every stream to begin")
        fault(streams)
        await all_ended(streams, 120)
        return streams

    return asyncio.run(run())


def test_two_ingresses_share_the_load(faulty: RunningService, accounts: Accounts) -> None:
    """Once HAProxy knows both, which may be a moment after the service is ready."""

    def shared() -> bool:
        before = by_ingress()
        streams = with_streams(faulty, CAPACITY, 50, lambda _: None)
        assert all(stream.done and stream.events == 50 for stream in streams)
        accounts.close(ok=CAPACITY)
        return sum(number >= CAPACITY // 4 for number in (by_ingress() - before).values()) == 2

    def by_ingress() -> Counter[str]:
        counted: Counter[str] = Counter()
        for labels, value in faulty.scrape().samples[REQUESTS.prom_name]:
            counted[labels["replica"]] += int(value)
        return counted

    until(shared, 60, "both ingresses to take their part")


def test_a_replica_is_killed_with_64_streams(faulty: RunningService, accounts: Accounts) -> None:
    def said(replicas: int) -> int:
        return faulty.logs().count(f"{replicas} of {REPLICAS} replicas generate")

    victim, before = faulty.processes(REPLICA)[0], (said(1), said(2))
    streams = with_streams(faulty, CAPACITY, 300, lambda _: os.kill(victim, signal.SIGKILL))
    lost = [stream for stream in streams if not stream.done]
    assert 0 < len(lost) < CAPACITY
    assert {stream.status for stream in streams} == {200}
    for stream in lost:
        assert stream.error is not None
        assert stream.error["code"] == "replica_lost"
        assert stream.complete, "the client is told, not cut off"
    assert all(stream.events == 300 for stream in streams if stream.done)
    accounts.close(ok=CAPACITY - len(lost), error=len(lost))
    until(lambda: said(2) == before[1] + 2, 60, "both ingresses to see the new replica")
    assert said(1) == before[0] + 2, "a line for each ingress, not one for each stream"


def test_requests_whose_replica_dies_before_their_first_token_are_served(
    faulty: RunningService, accounts: Accounts
) -> None:
    """4 requests with 4 seconds of prefill, on both replicas; those of the one that dies go to the other."""
    asked = [body(3, prompt=list(range(4000)), stream=stream) for stream in (True, False, True, False)]

    async def run() -> list[Stream]:
        streams = await open_streams(faulty.config["port"], asked)
        await asyncio.sleep(1)
        os.kill(faulty.processes(REPLICA)[0], signal.SIGKILL)
        await all_ended(streams, 120)
        return streams

    streams = asyncio.run(run())
    assert [one.status for one in streams] == [200] * 4
    assert not any(one.error for one in streams)
    assert [one.done for one in streams] == [True, False, True, False]
    assert '"tried_again": true' in faulty.logs(), "one of them at least has been on the replica that died"
    accounts.close(ok=4)


def test_an_ingress_is_killed(faulty: RunningService, accounts: Accounts) -> None:
    victim = faulty.processes(INGRESS)[0]
    streams = with_streams(faulty, CAPACITY, 200, lambda _: os.kill(victim, signal.SIGKILL))
    cut = [stream for stream in streams if not stream.done]
    assert 0 < len(cut) < CAPACITY
    assert not any(stream.complete for stream in cut), "half an answer must not look like a whole one"
    assert all(stream.events == 200 for stream in streams if stream.done)
    # The engines stop what nobody reads any more.
    until(lambda: faulty.scrape().total(RUNNING_REQUESTS) == 0, 30, "the engines to be idle")
    until(lambda: len(faulty.processes(INGRESS)) == 2, 60, "a new ingress")
    # The dead ingress takes what it had not exported yet with it; from here on the books are right again.
    faulty.settled()
    accounts.expected = accounts.counted()


def test_a_burst_of_ten_times_the_capacity(faulty: RunningService, accounts: Accounts) -> None:
    def running_by_replica() -> list[float]:
        samples = faulty.scrape().samples[RUNNING_REQUESTS.prom_name]
        return sorted(value for _, value in samples if value)

    async def run() -> list[Stream]:
        # Long enough for the metrics to see the replicas full.
        streams = await open_streams(faulty.config["port"], [body(750)] * (10 * CAPACITY))
        await reached(lambda: sum(one.status == 429 for one in streams) > 8 * CAPACITY, 60, "refusals")
        assert await asyncio.to_thread(
            until, lambda: running_by_replica() == [PLACES] * REPLICAS, 30, "both replicas to be full"
        )
        await all_ended(streams, 120)
        return streams

    streams = asyncio.run(run())
    counted = Counter(stream.status for stream in streams)
    assert set(counted) == {200, 429}
    assert counted[200] >= CAPACITY
    assert all(stream.done and stream.events == 750 for stream in streams if stream.status == 200)
    waits = [stream.retry_after_s for stream in streams if stream.status == 429]
    assert min(waits) >= 1
    assert len(set(waits)) > 1, "they must not all come back at once"
    accounts.close(ok=counted[200], rejected=counted[429])


def test_a_slow_reader_slows_nobody(faulty: RunningService, accounts: Accounts) -> None:
    async def run() -> None:
        (slow,) = await open_streams(faulty.config["port"], [body(800, n=32)])
        await reached(lambda: slow.events > 0, 30, "the slow stream to begin")
        slow.transport.pause_reading()
        others = await open_streams(faulty.config["port"], [body(50)] * 16)
        await all_ended(others, 30)
        assert all(one.done and one.ended_at_s - one.first_at_s < 50 * STEP_S * 3 for one in others)
        slow.transport.resume_reading()
        await all_ended([slow], 120)
        assert slow.done
        assert slow.events == 800 * 32

    asyncio.run(run())
    accounts.close(ok=17)


def test_half_open_clients(faulty: RunningService, accounts: Accounts, half_a_request: socket.socket) -> None:
    """One that sends half a request, and one that closes its half of the connection after a whole one."""
    with socket.create_connection(("127.0.0.1", faulty.config["port"])) as closed:
        closed.sendall(HEAD + REQUEST)
        assert closed.recv(100).startswith(b"HTTP/1.1 200")
        closed.shutdown(socket.SHUT_WR)
        until(lambda: faulty.scrape().total(RUNNING_REQUESTS) == 0, 30, "the closed one to be stopped")
    half_a_request.settimeout(60)
    assert half_a_request.recv(1000).startswith(b"HTTP/1.1 408"), "it must not hold its place for ever"
    accounts.close(aborted=1)


def test_clients_leave_during_prefill(faulty: RunningService, accounts: Accounts) -> None:
    """A prompt of 20 s, left after 1 s, plain and streamed: the engine stops before there is a token."""
    for stream in (True, False):
        with pytest.raises(httpx.ReadTimeout):
            faulty.post("completions", body(50, prompt=list(range(20_000)), stream=stream), timeout_s=1)
    left_at_s = time.monotonic()
    until(lambda: faulty.scrape().total(RUNNING_REQUESTS) == 0, 15, "both to be stopped")
    assert time.monotonic() - left_at_s < 15, "long before the prompt would have been read"
    accounts.close(aborted=2)


def test_clients_leave_plain_requests(faulty: RunningService, accounts: Accounts) -> None:
    """Many, at different times: what makes one in twenty of them unnoticed shows."""
    number, chance = 100, random.Random(1)

    # By these Serve would go on after its client has left, or give up by itself.
    headers = {"x-request-disconnect-disabled": "?1", "x-request-timeout-seconds": "0.05"}
    asked = {"model": "demo", "prompt": "x", "max_tokens": 30_000}

    def leave(wait_s: float) -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{faulty.url}/v1/completions", json=asked, headers=headers, timeout=wait_s)

    with ThreadPoolExecutor(8) as clients:
        list(clients.map(leave, [chance.uniform(0.1, 1) for _ in range(number)]))
    accounts.close(aborted=number)


def test_a_replica_that_stands_still_for_5_seconds(faulty: RunningService, accounts: Accounts) -> None:
    """The whole process, so that nothing in it can notice; the other serves meanwhile."""
    victim = faulty.processes(REPLICA)[0]

    def stall(streams: list[Stream]) -> None:
        os.kill(victim, signal.SIGSTOP)
        # Whatever becomes of the streams.
        threading.Timer(5, os.kill, (victim, signal.SIGCONT)).start()

    # As many as both have places for: fewer may all be on one, where a report of the other came late.
    streams = with_streams(faulty, CAPACITY, 100, stall)
    assert all(stream.done and stream.events == 100 for stream in streams), "late is not lost"
    took_s = [stream.ended_at_s - stream.first_at_s for stream in streams]
    assert max(took_s) >= 5
    assert min(took_s) < 5, "the other replica goes on"
    accounts.close(ok=CAPACITY)


def test_a_restart_under_load(faulty: RunningService, accounts: Accounts) -> None:
    """SIGHUP with another configuration: replicas and ingresses are replaced, and nobody notices."""
    before = set(faulty.processes("ServeReplica:deltalog:"))
    faulty.process.send_signal(signal.SIGHUP)
    until(lambda: "Nothing has changed." in faulty.output(), 10, "it to have looked")
    assert before == set(faulty.processes("ServeReplica:deltalog:"))
    (pool,) = faulty.config["pools"]
    config = faulty.config | {"pools": [pool | {"coalesce_tokens": 8}]}
    (faulty.folder / "service.yaml").write_text(yaml.safe_dump(config))
    streams: list[Stream] = []

    async def run() -> None:
        faulty.process.send_signal(signal.SIGHUP)
        deadline_s = time.monotonic() + 120
        while "The new configuration serves." not in faulty.output():
            assert time.monotonic() < deadline_s, faulty.output()
            streams.extend(await open_streams(faulty.config["port"], [body(100)] * 4))
            await asyncio.sleep(0.5)
        await all_ended(streams, 60)

    asyncio.run(run())
    failed = [(one.status, one.events, one.error) for one in streams if not one.done]
    assert not failed, f"{len(failed)} of {len(streams)}"
    accounts.close(ok=len(streams))
    until(lambda: not before & set(faulty.processes("ServeReplica:deltalog:")), 30, "the old ones to be gone")

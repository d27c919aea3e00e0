"""The shipped rules on a faster clock, on a live service that is broken, overloaded and slowed down: alerts
reach a real Alertmanager, and resolve once all is well again."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from alerting import Inbox, receiving
from load import Stream, all_ended, body, open_streams
from prometheus import running_alertmanager, running_prometheus
from running_service import RunningService, running, simulated
from waiting import repeated

from dashboards import rules

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

FASTER = 30
"""Minutes become two seconds: the shortest window, of 5 minutes, still holds two exports of Ray's."""
REPLICA = "ServeReplica:deltalog:test"
PLACES = 16
STEP_MS = 10
FIRES_S = 120
TPOT_MS = 25


def asked(
    service: RunningService, clients: int, tokens: int, seconds: float, enough: Callable[[], bool] = bool
) -> list[Stream]:
    """What `clients` get that ask anew after each answer, until it is `enough` or the time is over."""
    streams: list[Stream] = []

    async def client(until_s: float) -> None:
        while time.monotonic() < until_s and not enough():
            opened = await open_streams(service.config["port"], [body(tokens)])
            await all_ended(opened, 120)
            streams.extend(opened)

    async def run() -> None:
        until_s = time.monotonic() + seconds
        await asyncio.gather(*(client(until_s) for _ in range(clients)))

    asyncio.run(run())
    return streams


def crash(service: RunningService) -> None:
    for pid in service.processes(REPLICA):
        os.kill(pid, signal.SIGKILL)


def stutter(service: RunningService) -> None:
    """The replica stands still for the time of many steps."""
    for pid in service.processes(REPLICA):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(pid, signal.SIGCONT)


def crash_again_and_again(service: RunningService, fired: Callable[[], bool]) -> None:
    """A replica that falls as soon as it stands, the first time with streams on it."""
    with repeated(lambda: crash(service), 1):
        streams = asked(service, PLACES, 3000, FIRES_S, fired)
    assert any(stream.error for stream in streams)


def overload(service: RunningService, fired: Callable[[], bool]) -> None:
    """Four times as many clients as it has places."""
    asked(service, 4 * PLACES, 300, FIRES_S, fired)


def slow_down(service: RunningService, fired: Callable[[], bool]) -> None:
    """Another process on its processor, say."""
    with repeated(lambda: stutter(service), 0.1):
        asked(service, PLACES // 2, 60, FIRES_S, fired)


FAULTS = {
    "DeltaLogNoReadyReplica": crash_again_and_again,
    "DeltaLogQueueGrowing": overload,
    "DeltaLogTpotBurnRate": slow_down,
}


def has_fired(inbox: Inbox, alert: str) -> bool:
    """It may have resolved since: the last clients wait for their answers after that."""
    return any(each["labels"]["alertname"] == alert for each in inbox.alerts)


def has_resolved(inbox: Inbox, alert: str) -> bool:
    return alert in {name for name, _ in inbox.last("resolved")}


def test_faults_of_a_live_service_fire_and_resolve(tmp_path: Path) -> None:
    pool = {
        "replicas": 1,
        "max_concurrent_requests": PLACES,
        "slo": {"tpot_ms": TPOT_MS, "ttft_ms": 20_000},
    }
    config = simulated(STEP_MS, pool=pool, max_queued_requests=4 * PLACES)
    targets = [f"127.0.0.1:{config['metrics_port']}"]
    with (
        receiving() as (inbox, webhook),
        running_alertmanager(tmp_path, webhook) as alertmanager,
        running(config, tmp_path) as service,
        running_prometheus(tmp_path, targets, rules.rendered(FASTER), alertmanager=alertmanager),
    ):
        asked(service, PLACES // 2, 100, 20)
        assert not inbox.of_pools(), "nothing is wrong yet"
        for alert, fault in FAULTS.items():
            fault(service, partial(has_fired, inbox, alert))
            assert has_fired(inbox, alert), f"expected {alert}; got {inbox.of_pools()}"
            service.wait_ready()
            asked(service, PLACES // 2, 100, FIRES_S, partial(has_resolved, inbox, alert))
            assert has_resolved(inbox, alert), f"expected {alert} to resolve; got {inbox.last('firing')}"
    assert all("{{" not in "".join(alert["annotations"].values()) for alert in inbox.of_pools())

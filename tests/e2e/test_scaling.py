"""Simulated engines on real Ray Serve, over minutes: replicas follow the load, the simulator is right."""

import asyncio
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from statistics import median

import pytest
from load import Stream, all_ended, body, open_streams, reached
from running_service import running, simulated
from waiting import until

from service.metrics.routing import DESIRED_REPLICAS
from service.sim.scenario import Scenario, SimPool, SloClass
from service.sim.workload import Generator, Phase
from service.sim.world import World

pytestmark = pytest.mark.long


def test_replicas_follow_the_load(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """At the SLO's margin a replica holds eight rows: six streams want one, 18 three. No stream is cut
    when the load comes or when it goes."""
    pool = {
        "name": "scaled",
        "model": "simulated",
        "served_model_name": "demo",
        "cpus_per_replica": 0.25,
        "sim": {"fixed_ms": 10, "per_row_ms": 2, "per_prefill_token_ms": 0},
        "max_replicas": 4,
        "start_s": 2.0,
        "slo": {"tpot_ms": 30, "ttft_ms": 60_000},
    }
    with running(simulated(20, pools=[pool], max_queued_requests=100), tmp_path) as service:
        port, seen = service.config["port"], []

        def replicas() -> int:
            number = len(service.processes("ServeReplica:deltalog:scaled"))
            if seen[-1:] != [number]:
                seen.append(number)
            return number

        async def run() -> list[Stream]:
            calm = await open_streams(port, [body(3000)] * 6)
            await reached(lambda: all(stream.events for stream in calm), 30, "the calm ones to begin")
            assert replicas() == 1
            busy = await open_streams(port, [body(400)] * 12)
            await reached(lambda: replicas() >= 2, 60, "another replica")
            await all_ended(busy, 120)
            await reached(lambda: replicas() == 1, 120, "the replicas to follow")
            await all_ended(calm, 120)
            return [*calm, *busy]

        streams = asyncio.run(run())
        assert [(stream.status, stream.done) for stream in streams] == [(200, True)] * 18
        until(lambda: service.scrape().total(DESIRED_REPLICAS) == 1, 15, "the gauge to say so")
        record_property("result", f"replicas {' '.join(map(str, seen))}, 18 of 18 streams whole")


def test_the_simulator_agrees_with_ray_serve(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The same requests on two replicas under the same policy: TPOT p50 and throughput within 10 %."""
    workload = Generator(
        phases=(Phase(requests_per_s=3.0, seconds=30.0),), prompt_tokens=200, output_tokens=150, spread=0.3
    )
    told = Scenario(
        pools=(SimPool(name="sim", fixed_ms=20, row_ms=0.5, state_ms=0, prefill_token_ms=0.02, replicas=2),),
        workload=workload,
        slos=(SloClass(tpot_ms=1e6, ttft_ms=1e6),),
        seed=time.time_ns() % 1000,
    )
    outcome = World(told, "pack auto").run()
    jobs = [job for job in outcome.jobs if job.end_s < inf]
    pool = {"sim": {"fixed_ms": 20, "per_row_ms": 0.5, "per_prefill_token_ms": 0.02}, "replicas": 2}
    with running(simulated(20, pool=pool | {"max_concurrent_requests": 256}), tmp_path) as service:

        async def one(start_s: float, arrived_s: float, prompt: int, tokens: int) -> Stream:
            await asyncio.sleep(start_s + arrived_s - time.monotonic())
            asked = body(tokens, prompt=[1] * prompt)
            (stream,) = await open_streams(service.config["port"], [asked])
            await stream.ended
            return stream

        async def replayed() -> tuple[list[Stream], float]:
            start_s = time.monotonic() + 0.5
            streams = await asyncio.gather(
                *(one(start_s, job.arrived_s, job.prompt_tokens, job.output_tokens) for job in jobs)
            )
            return list(streams), max(stream.ended_at_s for stream in streams) - start_s

        streams, seconds = asyncio.run(replayed())
    assert all(stream.done for stream in streams)
    tpot_ms = [
        1000 * (stream.ended_at_s - stream.first_at_s) / (job.output_tokens - 1)
        for stream, job in zip(streams, jobs, strict=True)
        if job.output_tokens > 20
    ]
    simulated_ms = [job.tpot_ms for job in jobs if job.output_tokens > 20]
    tokens = sum(job.output_tokens for job in jobs)
    measured, told_by_it = (median(tpot_ms), tokens / seconds), (median(simulated_ms), tokens / outcome.end_s)
    record_property(
        "result",
        f"TPOT p50 {measured[0]:.1f} ms, simulated {told_by_it[0]:.1f}; {measured[1]:.0f} tokens/s, "
        f"simulated {told_by_it[1]:.0f}",
    )
    assert measured == pytest.approx(told_by_it, rel=0.1)

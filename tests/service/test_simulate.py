"""The simulator: right about itself, equal to the simulated engine, and what it says of the policies."""

import asyncio
import json
import subprocess
import sys
import time
from functools import cache
from math import inf
from pathlib import Path

import pytest
import yaml

from service.config import ConfigError, parse, read_yaml
from service.engine.protocol import Call
from service.engine.sim_engine import SimEngine
from service.pools import PoolConfig, SimConfig
from service.sim.report import Report, Row
from service.sim.scenario import Failure, Scenario, SimPool, SloClass
from service.sim.workload import Generator, Phase, trace
from service.sim.world import World

ROOT = Path(__file__).parents[2]
DAY = ROOT / "deploy" / "sim" / "day.yaml"
MEASURED = ROOT / "deltalog_kernels" / "bench" / "results" / "h200-2026-12-01-serving-qwen3.6-35b-a3b.json"
TRACES = ROOT.parent / "shared" / "data" / "traces"
H200 = SimPool(
    name="h200",
    fixed_ms=16.0,
    row_ms=0.0302,
    state_ms=0.0182,
    write_through_state_ms=0.0315,
    prefill_token_ms=0.03,
    rows_limit=512,
)


ESTIMATE = H200.model_copy(
    update={"fixed_ms": 5.93, "row_ms": 0.0246, "state_ms": 0.0237, "write_through_state_ms": 0.0391,
            "prefill_token_ms": 0.033}
)  # fmt: skip
"""A model with lighter weights: steps of 10 ms at 64 rows, a quarter of them for the recurrent layers. Bf16
weights of 35B parameters cannot serve the trace below in time on eight GPUs, whatever the policy."""


def poisson(rate: float, seconds: float, **lengths) -> Generator:
    return Generator(phases=(Phase(requests_per_s=rate, seconds=seconds),), **lengths)


def run(policy: str, **scenario) -> tuple[Row, list]:
    told = Scenario(**scenario)
    outcome = World(told, policy).run()
    return Row.of(policy, told, outcome), outcome.jobs


@cache
def day(policy: str, with_log: bool = True) -> Row:
    told = parse(Scenario, read_yaml(DAY), str(DAY))
    if not with_log:
        [pool] = told.pools
        through = {"state_ms": pool.write_through_state_ms, "write_through_state_ms": None}
        told = told.model_copy(update={"pools": (pool.model_copy(update=through),)})
    return Row.of(policy, told, World(told, policy).run())


def test_the_steps_of_the_day_are_those_of_an_engine_on_an_h200():
    """Its constants are a straight line; the experts of the model bend the measured one a little."""
    pool = yaml.safe_load(DAY.read_text())["pools"][0]
    states = {"stock": pool["write_through_state_ms"], "deltalog": pool["state_ms"]}
    results = json.loads(MEASURED.read_text())["results"]
    assert [row["batch"] for row in results] == [64, 256, 512]
    for row in results:
        for side, state_ms in states.items():
            simulated_ms = pool["fixed_ms"] + row["batch"] * (pool["row_ms"] + state_ms)
            assert row[side]["tpot_ms"] == pytest.approx(simulated_ms, rel=0.1)


def test_one_request_by_hand():
    """1,100 prompt tokens in chunks of 512: three steps, of 512, 512 and 76 tokens; the last has the row."""
    lengths = {"prompt_tokens": 1100, "output_tokens": 11, "spread": 0.0}
    row, jobs = run("pack 1", pools=(H200,), workload=poisson(0.001, 2000, **lengths), seed=3)
    job = jobs[0]
    prefill = [16 + 0.03 * 512] * 2 + [16 + 0.0484 + 0.03 * 76]
    assert job.ttft_ms == pytest.approx(sum(prefill))
    assert job.tpot_ms == pytest.approx(16.0484)
    assert row.attainment == 1
    assert row.gpu_seconds == pytest.approx(jobs[-1].end_s)


def test_a_request_that_comes_in_mid_step_joins_at_its_end():
    two = Generator(phases=(Phase(requests_per_s=1e-9, seconds=1),))
    world = World(Scenario(pools=(H200,), workload=two), "pack 1")
    world._start(0, 0.0, ready=True)
    [replica] = world.alive[0]
    from service.sim.replica import Job

    first, second = (Job(i, 0.0, 100, 50, SloClass()) for i in range(2))
    end_s = replica.take(first, 0.0)
    assert end_s == pytest.approx(0.001 * (16 + 0.0484 + 3))
    replica.settle()
    assert replica.plan(end_s) == pytest.approx(end_s + 49 * 0.0160484)
    assert replica.take(second, end_s + 0.020) == pytest.approx(end_s + 2 * 0.0160484)
    replica.settle()
    joined_s = replica.plan(end_s + 2 * 0.0160484)
    assert joined_s == pytest.approx(end_s + 0.001 * (2 * 16.0484 + 16 + 2 * 0.0484 + 3))


@pytest.mark.parametrize("policy", ["pack auto", "pack 0", "pack 1", "least loaded", "power of two",
                                    "round robin", "prefix affinity"])  # fmt: skip
def test_every_request_has_one_outcome_whatever_happens(policy):
    """Two routers with stale views, two pools, bursts, a replica that dies and one that gets slow."""
    scenario = {
        "pools": (
            H200.model_copy(update={"replicas": 3, "rows_limit": 40}),
            H200.model_copy(update={"name": "spill", "fixed_ms": 30.0, "rows_limit": 20}),
        ),
        "workload": poisson(15, 60, output_tokens=200, burst=4.0, prefixes=5),
        "slos": (
            SloClass(name="chat", share=0.7),
            SloClass(name="batch", tpot_ms=100, ttft_ms=9000, share=0.3),
        ),
        "routers": 2,
        "failures": (Failure(at_s=20.0), Failure(at_s=30.0, replica=1, slow_down=3.0)),
    }
    row, jobs = run(policy, **scenario)
    ended = [job for job in jobs if job.end_s < inf]
    assert len(jobs) > 700
    assert len(ended) + row.rejected + row.lost == len(jobs)
    assert all(job.arrived_s < job.first_s <= job.end_s for job in ended)
    assert row.lost > 0, "those that had their first token when it died"
    if policy == "pack 1":
        assert any(job.retried for job in ended), "the oldest had a backlog when it died"
    assert row.spilled > 0
    again, _ = run(policy, **scenario)
    assert again == row, "a seed decides everything"


def test_nobody_waits_while_a_replica_could_take_them():
    told = Scenario(pools=(H200.model_copy(update={"replicas": 2, "rows_limit": 30}),),
                    workload=poisson(12, 60, burst=3.0))  # fmt: skip
    world, waited = World(told, "pack 1"), 0
    serve = world._serve_queues

    def serve_and_check(now_s: float) -> None:
        nonlocal waited
        serve(now_s)
        for router in world.routers:
            for job in list(router.queue)[:1]:
                waited += 1
                assert router.policy.choose(router.pools, router.ask(job, now_s)).replica is None

    world._serve_queues = serve_and_check
    world.run()
    assert waited > 100


def test_two_routers_do_not_overshoot_a_limit_by_more_than_one_decision_each():
    told = Scenario(pools=(H200.model_copy(update={"rows_limit": 50}),), routers=2, report_period_s=0.2,
                    slos=(SloClass(tpot_ms=1e6, ttft_ms=1e6),),
                    workload=poisson(40, 20, output_tokens=400, spread=0.0))  # fmt: skip
    world, most = World(told, "pack 1"), 0
    route = world._route

    def route_and_look(*args) -> bool:
        nonlocal most
        done = route(*args)
        most = max(most, *(replica.rows for replica in world.alive[0]))
        return done

    world._route = route_and_look
    world.run()
    assert most >= 50, "it was full"
    assert most <= 50 + 2 * 40 * 0.2, "each router is blind for a report period"


def test_the_simulated_engine_agrees():
    """The same requests, in the time of this machine: TPOT p50 and throughput within 10 %."""
    model = SimConfig(fixed_ms=8.0, per_row_ms=0.1, per_prefill_token_ms=0.02, max_rows=512)
    pool = SimPool(name="sim", fixed_ms=8.0, row_ms=0.1, state_ms=0.0, prefill_token_ms=0.02, rows_limit=512)
    workload = poisson(20.0, 4.0, prompt_tokens=300, output_tokens=120)
    row, jobs = run(
        "least loaded", pools=(pool,), workload=workload, slos=(SloClass(tpot_ms=1e9, ttft_ms=1e9),)
    )

    async def measured() -> tuple[float, float]:
        config = PoolConfig(name="sim", model="sim", sim=model)
        engine = SimEngine(config)
        await engine.start()
        start_s, tpots = time.monotonic(), []

        async def one(job) -> None:
            await asyncio.sleep(start_s + job.arrived_s - time.monotonic())
            body = {"model": "sim", "prompt": [1] * job.prompt_tokens, "max_tokens": job.output_tokens,
                    "stream": True}  # fmt: skip
            answer = engine.answer(Call("completion", body, str(job.index)))
            at = [time.monotonic() async for _ in answer]
            # The outbox lets the first token go at once and the last when all is done.
            tpots.append((at[-1] - at[1]) / max(1, job.output_tokens - 1))

        await asyncio.gather(*map(one, jobs))
        engine.shutdown()
        return 1000 * sorted(tpots)[len(tpots) // 2], time.monotonic() - start_s

    tpot_ms, seconds = asyncio.run(measured())
    assert tpot_ms == pytest.approx(row.tpot.p50, rel=0.1)
    assert seconds == pytest.approx(max(job.end_s for job in jobs), rel=0.1)


def test_packing_serves_the_day_on_fewer_gpu_seconds():
    packed, two = day("pack 1"), day("power of two")
    assert packed.attainment >= 0.99
    assert packed.gpu_seconds <= 0.9 * two.gpu_seconds


def test_auto_keeps_the_slo_and_costs_no_more():
    auto, two = day("pack auto"), day("power of two")
    assert auto.attainment >= 0.99
    assert auto.tpot.p99 <= 25.0
    assert auto.gpu_seconds <= 1.01 * two.gpu_seconds


def test_balancing_is_no_slower_than_power_of_two():
    assert day("pack 0").tpot.p99 <= 1.01 * day("power of two").tpot.p99


def test_the_log_saves_replicas():
    with_log, without = day("pack 1"), day("pack 1", with_log=False)
    # Both turn away what comes while replicas start, write-through a little more.
    assert 0.985 <= without.attainment <= with_log.attainment
    assert with_log.gpu_seconds < 0.95 * without.gpu_seconds


@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not at hand (../shared/data/traces)")
def test_the_azure_conversations_ten_times_as_fast_on_eight_replicas():
    fleet = {"pools": (ESTIMATE.model_copy(update={"replicas": 8}),), "trace_rate": 10.0,
             "trace": TRACES / "azure-2023-conv.csv"}  # fmt: skip
    rows = {policy: run(policy, **fleet)[0] for policy in ("pack auto", "pack 0", "pack 1", "power of two")}
    assert {row.requests for row in rows.values()} == {19366}
    assert min(row.attainment for row in rows.values()) >= 0.99
    assert rows["pack 0"].tpot.p99 <= rows["power of two"].tpot.p99
    assert rows["pack auto"].tpot.p99 <= rows["power of two"].tpot.p99


@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not at hand (../shared/data/traces)")
def test_traces_with_prefixes():
    arrivals = list(trace(TRACES / "mooncake-conversation.jsonl", limit=100))
    assert len(arrivals) == 100
    assert len({arrival.prefix for arrival in arrivals}) < 100


def test_a_file_that_is_no_trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match=r"trace.csv: expected a trace .* KeyError\('TIMESTAMP'\)"):
        list(trace(path))


def test_the_command(tmp_path):
    told = yaml.safe_load(DAY.read_text())
    told["workload"]["phases"] = [{"requests_per_s": 4, "seconds": 20}]
    told["policies"] = ["pack auto", "round robin"]
    scenario, output = tmp_path / "s.yaml", tmp_path / "out.json"
    scenario.write_text(yaml.safe_dump(told))
    command = [sys.executable, "-m", "service", "simulate", str(scenario), "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "round robin" in done.stdout
    report = Report.model_validate_json(output.read_text())
    assert [row.policy for row in report.rows] == told["policies"]
    assert json.loads(output.read_text())["scenario"]["seed"] == 1

    told["policies"] = ["pack 2"]
    scenario.write_text(yaml.safe_dump(told))
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "policies[0]" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_hundred_replicas_and_a_hundred_thousand_requests_in_two_minutes():
    start = time.process_time()
    row, jobs = run("pack auto", pools=(H200.model_copy(update={"replicas": 100}),),
                    workload=poisson(250, 400, prompt_tokens=512, output_tokens=400))  # fmt: skip
    assert len(jobs) > 99_000
    assert row.attainment > 0.99
    assert time.process_time() - start < 120

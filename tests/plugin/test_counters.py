"""The counters against a count by hand: one loop over the positions of each request."""

import json
import os
import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path

import pytest
from engines import ADDITIONAL, engine, random_texts, scheduled, teacher_forced

from deltalog_kernels.traffic import append, fill, merge, write_through

LAYERS = 3  # without prefix caching, layer n's log is n tokens ahead of that of the first
PROMPTS, TOKENS = [3, 17, 40, 64], 50


def by_hand(layout, chunks: int) -> dict:
    """What a request's prefill in chunks of ``chunks`` tokens and its decodes must have moved."""
    interval = layout.merge_interval
    reads, writes = (dict.fromkeys(("append", "merge", "fold", "fill"), 0) for _ in range(2))
    merged = baseline = 0

    def add(kind, traffic):
        reads[kind] += traffic.read_bytes
        writes[kind] += traffic.write_bytes

    for prompt, ahead in product(PROMPTS, range(LAYERS)):
        for start in range(0, prompt, chunks):
            if start and (start + ahead) % interval:
                add("fold", merge(layout, (start + ahead) % interval))
            add("fill", fill(layout, (min(start + chunks, prompt) + ahead) % interval))
        # The last token is sampled and never decoded.
        for position in range(prompt, prompt + TOKENS - 1):
            live = (position + ahead) % interval
            merging = live == interval - 1
            add("merge" if merging else "append", (merge if merging else append)(layout, live))
            merged += merging
            baseline += write_through(layout).write_bytes
    return {
        "merge_interval": interval,
        "merges": merged,
        "state_bytes": {"read": reads, "write": writes},
        "write_through_bytes": {"read": baseline, "write": baseline},
    }


def since(before: dict, after: dict) -> dict:
    """What was counted between two answers. On a GPU vLLM's warm-up has decoded a row before the first."""
    gauges = ("merge_interval", "live_entries")
    return {
        name: now
        if name in gauges
        else since(before[name], now)
        if isinstance(now, dict)
        else now - before[name]
        for name, now in after.items()
    }


@pytest.mark.parametrize("interval", [1, 8])
def test_counters_equal_a_count_by_hand(engine_model: Path, interval):
    # One request at a time, so that chunks are what the loop above says.
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 10, "enable_prefix_caching": False}
    with engine(engine_model, interval, **options) as llm:
        layer = next(m for m in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
                     if hasattr(m, "layout"))  # fmt: skip
        [before] = llm.collective_rpc("deltalog_counters")
        teacher_forced(llm, random_texts(PROMPTS, tokens=TOKENS, seed=4))
        [after] = llm.collective_rpc("deltalog_counters")
    counters = since(before, after)
    last_position = PROMPTS[-1] + TOKENS - 1
    assert counters.pop("live_entries") == sum((last_position + ahead) % interval for ahead in range(LAYERS))
    assert counters == by_hand(layer.layout, chunks=10)
    if interval == 8:
        written = counters["state_bytes"]["write"]
        ratio = counters["write_through_bytes"]["write"] / (written["append"] + written["merge"])
        assert 6.5 < ratio < 7.5


@pytest.mark.parametrize(("caching", "at_once"), [(False, 1), (True, LAYERS)])
def test_layers_take_turns_to_merge(engine_model: Path, caching, at_once):
    """Of rows that arrive together, no step merges more logs than one layer's, unless blocks are cached."""
    rows, interval = 4, 8
    merged = []

    def count(llm) -> None:
        merged.append(llm.collective_rpc("deltalog_counters")[0]["merges"])

    with engine(engine_model, interval, enable_prefix_caching=caching) as llm:
        scheduled(
            llm, random_texts([5] * rows, tokens=2 * interval + 1, seed=6), [0] * rows, after_step=count
        )
    steps = [after - before for before, after in pairwise(merged)]
    assert max(steps) == at_once * rows
    assert sum(steps) == 2 * LAYERS * rows


SERVER = """
import asyncio, json, pathlib, sys
from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

async def main():
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(
        sys.argv[1], additional_config=json.loads(sys.argv[4]), enforce_eager=True,
        max_model_len=256, distributed_executor_backend=sys.argv[2]))
    before = await llm.collective_rpc("deltalog_counters")
    async for _ in llm.generate("x", SamplingParams(max_tokens=17, ignore_eos=True), "1"):
        pass
    counters = await llm.collective_rpc("deltalog_counters")
    pathlib.Path(sys.argv[3]).write_text(json.dumps(before + counters))
    llm.shutdown()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_counters_of_an_engine_in_its_own_process(demo_model: Path, tmp_path: Path, executor):
    """The front end's copy of the configuration is not the worker's, in either of vLLM's executors."""
    script, answer = tmp_path / "server.py", tmp_path / "counters.json"
    script.write_text(SERVER)
    # vLLM's CPU platform turns `uni` into `mp` unless told that there is one process.
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if executor == "uni" else "1"}
    additional = json.dumps(ADDITIONAL | {"deltalog": {"merge_interval": 8}})
    command = [sys.executable, str(script), str(demo_model), executor, str(answer), additional]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    counters = since(*json.loads(answer.read_text()))
    assert counters["merges"] == LAYERS * 2
    assert counters["merge_interval"] == 8

"""One engine's decode steps, timed in the engine's own process; `deltalog bench serving` starts this.

``python -m deltalog_kernels.vllm_plugin.decode_times RESULT`` reads a Job from stdin. vLLM runs as it serves:
the engine core in a process of its own, asynchronous scheduling, CUDA graphs. Its outputs carry the time at
which the core had them; the step times are the gaps between those, so a slow front end does not count.
"""

import gzip
import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from deltalog_kernels.bench.serving import Job, Point
from deltalog_kernels.vllm_plugin.config import SECTION
from deltalog_kernels.vllm_plugin.seeded_weights import LOAD_FORMAT

SETTLING = 16
"""Steps with all rows decoding before the first that counts: the scheduler still runs ahead of the core."""
PROFILED = 16
RECURRENT = re.compile("fused_recurrent|delta_rule_kernel|fold_kernel|fill_kernel")
"""Kernels that decode a recurrent layer: vLLM's and ours."""


def main(job: Job, report: Callable[[Point], None]) -> None:
    """Measure each batch of the job and report it at once: a later one may not fit."""
    with tempfile.TemporaryDirectory() as traces:
        llm = _engine(job, traces)
        try:
            _run(llm, job, min(job.batches), steps=job.steps)  # whatever compiles when first used
            for batch in job.batches:
                report(_point(llm, job, batch, Path(traces)))
        finally:
            llm.llm_engine.engine_core.shutdown()


def _engine(job: Job, traces: str) -> LLM:
    section = {} if job.merge_interval is None else {SECTION: {"merge_interval": job.merge_interval}}
    weights: dict[str, Any] = {} if job.real_weights else {"load_format": LOAD_FORMAT}
    profiler = {
        "profiler": "torch",
        "torch_profiler_dir": traces,
        "torch_profiler_with_stack": False,
        "torch_profiler_activities": ["CUDA"],
    }
    return LLM(
        job.model,
        skip_tokenizer_init=True,
        max_num_seqs=max(job.batches),
        max_model_len=job.prompt_tokens + job.most_tokens(),
        max_num_batched_tokens=job.token_budget,
        enable_prefix_caching=False,
        gpu_memory_utilization=job.gpu_memory_utilization,
        additional_config={"gdn_prefill_backend": "triton"} | section,
        profiler_config=profiler if job.profile else None,
        **weights,
        **job.engine_args,
    )


@dataclass
class _Steps:
    """When the engine core had the outputs of each step, and how many rows they were for."""

    at: list[float]
    rows: list[int]

    def decoding(self, batch: int, count: int) -> list[float]:
        """Times [count + 1] that bound ``count`` steps of all rows, after SETTLING of them."""
        full = [index for index, rows in enumerate(self.rows) if rows == batch]
        first = full[0] + SETTLING if full else 0
        chosen = range(first, first + count + 1)
        if not full or not set(chosen) <= set(full):
            raise RuntimeError(
                f"expected {count + SETTLING} steps with all {batch} requests decoding, got {len(full)}: the "
                "requests did not fit at once; choose a smaller batch or more of the GPU's memory"
            )
        return [self.at[index] for index in chosen]


def _run(llm: LLM, job: Job, batch: int, steps: int, when_full: Callable[[], None] = lambda: None) -> _Steps:
    """Decode ``batch`` random prompts until all have decoded side by side for ``steps`` steps."""
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    draw = random.Random(batch)
    params = SamplingParams(
        temperature=0, ignore_eos=True, detokenize=False, max_tokens=job.tokens(batch, SETTLING + steps)
    )
    engine, seen = llm.llm_engine, _Steps([], [])
    for request in range(batch):
        length = job.prompt_tokens - (draw.randrange(job.spread) if job.spread else 0)
        prompt = {"prompt_token_ids": [draw.randrange(10, vocabulary - 10) for _ in range(length)]}
        engine.add_request(f"{batch}-{request}-{draw.random()}", prompt, params)
    core, get_output = engine.engine_core, engine.engine_core.get_output

    def get_and_note() -> Any:
        outputs = get_output()
        if outputs.outputs:
            seen.at.append(outputs.timestamp)
            seen.rows.append(len(outputs.outputs))
        return outputs

    core.get_output = get_and_note
    called = False
    try:
        while engine.has_unfinished_requests():
            engine.step()
            if not called and seen.rows and seen.rows[-1] == batch:
                called = True
                when_full()
    finally:
        core.get_output = get_output
    return seen


def _point(llm: LLM, job: Job, batch: int, traces: Path) -> Point:
    before = _counters(llm, job)
    times = _run(llm, job, batch, job.steps).decoding(batch, job.steps)
    after = _counters(llm, job)
    point = Point(
        batch=batch,
        step_ms=[1e3 * (later - earlier) for earlier, later in pairwise(times)],
        merges=after.get("merges", 0) - before.get("merges", 0),
        state_write_bytes=_written(after) - _written(before),
        merge_interval=after.get("merge_interval"),
    )
    if job.profile:
        kernels = _profile(llm, job, batch, traces)
        total = sum(kernels.values())
        recurrent = sum(ms for name, ms in kernels.items() if RECURRENT.search(name))
        point.gpu_ms, point.recurrent_ms = total / PROFILED, recurrent / PROFILED
        point.kernels_ms = {name[:80]: ms / PROFILED for name, ms in kernels.most_common(12)}
    return point


def _counters(llm: LLM, job: Job) -> dict[str, Any]:
    if job.merge_interval is None:
        return {}
    counters: dict[str, Any] = llm.collective_rpc("deltalog_counters")[0]
    if "standing_aside" in counters:
        raise RuntimeError(f"expected an engine with a log, it stands aside: {counters['standing_aside']}")
    return counters


def _written(counters: dict[str, Any]) -> int:
    written = counters.get("state_bytes", {}).get("write", {})
    return sum(written.get(kind, 0) for kind in ("append", "merge"))


def _profile(llm: LLM, job: Job, batch: int, traces: Path) -> Counter[str]:
    """Milliseconds of each kernel over PROFILED steps of a full batch."""
    for old in traces.iterdir():
        old.unlink()
    start = partial(llm.llm_engine.start_profile, max_iterations=PROFILED, delay_iterations=SETTLING)
    _run(llm, job, batch, 3 * SETTLING + PROFILED, when_full=start)
    llm.llm_engine.stop_profile()
    found = list(traces.rglob("*.json.gz"))
    if not found:
        raise RuntimeError(f"expected a trace of the profiler in {traces}, got none")
    kernels: Counter[str] = Counter()
    for path in found:
        with gzip.open(path, "rt") as trace:
            for event in json.load(trace)["traceEvents"]:
                if event.get("cat") == "kernel":
                    kernels[event["name"]] += event["dur"] / 1e3
    return kernels


if __name__ == "__main__":
    destination = Path(sys.argv[1])

    def append(point: Point) -> None:
        with destination.open("a") as file:
            file.write(point.model_dump_json() + "\n")

    main(Job.model_validate_json(sys.stdin.read()), append)

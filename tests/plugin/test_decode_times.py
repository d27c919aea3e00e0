"""What `deltalog bench serving` starts, on the CPU: an engine as it serves, in processes of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltalog_kernels.bench import serving

pytestmark = pytest.mark.long


@pytest.mark.parametrize("interval", [None, 8])
def test_steps_of_full_batches_are_timed(demo_model: Path, tmp_path: Path, interval):
    job = serving.Job(
        model=str(demo_model),
        merge_interval=interval,
        batches=[1, 4],
        prompt_tokens=32,
        steps=32,
        token_budget=64,
        profile=False,
        engine_args={"enforce_eager": True},
    )
    result = tmp_path / "points"
    command = [sys.executable, "-m", serving.RUNNER, str(result)]
    done = subprocess.run(
        command,
        input=job.model_dump_json(),
        text=True,
        capture_output=True,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    points = [serving.Point.model_validate_json(line) for line in result.read_text().splitlines()]
    assert [point.batch for point in points] == [1, 4]
    for point in points:
        assert len(point.step_ms) == 32
        assert min(point.step_ms) > 0
        assert point.merge_interval == interval
        # Three layers, each of which merges once in eight tokens of a row.
        assert (point.merges >= 32 // 8 * 3 * point.batch) if interval else point.merges == 0

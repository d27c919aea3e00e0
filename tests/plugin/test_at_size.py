"""Qwen3.6-35B-A3B and Kimi-Linear-48B-A3B at their full size, with random weights of normal scale: as near to
stock as stock is to itself in another batch. Needs 120 GiB of GPU memory and some minutes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from configurations import KIMI_48B, QWEN36_35B
from engines import Difference

pytestmark = [pytest.mark.gpu, pytest.mark.long, pytest.mark.timeout(900)]

CONCURRENT = [256, 64]
# A full step, what a prompt leaves of it, and prompts beside decodes.
OPTIONS = {
    "max_num_seqs": 256,
    "max_model_len": 512,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 24 * 2**30,
    "gpu_memory_utilization": 0.5,
    "enable_prefix_caching": False,
}


class FullSize:
    """Engines of one model, each run once."""

    def __init__(self, name: str, config: dict, folder: Path) -> None:
        self.folder = folder / name
        self.folder.mkdir()
        (self.folder / "config.json").write_text(json.dumps(config))

    def decoded(
        self, interval: int | None, fault: str | None = None, **options: object
    ) -> list[torch.Tensor]:
        """Log-probabilities [texts, tokens, kept] of each run of CONCURRENT."""
        out = self.folder / f"{interval}-{fault}.pt"
        job = {
            "model": str(self.folder),
            "merge_interval": interval,
            "options": OPTIONS | options,
            "seed": 1,
            "concurrent": CONCURRENT,
            "fault": fault,
            "out": str(out),
        }
        script = Path(__file__).with_name("at_size.py")
        done = subprocess.run(
            [sys.executable, script, json.dumps(job)], capture_output=True, text=True, env=os.environ
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return torch.load(out)


@pytest.fixture(scope="module", params=["qwen3.6-35b-a3b", "kimi-linear-48b-a3b"])
def full_size(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FullSize:
    config = QWEN36_35B if request.param.startswith("qwen") else KIMI_48B
    return FullSize(request.param, config, tmp_path_factory.mktemp("size"))


@pytest.fixture(scope="module")
def stock(full_size: FullSize) -> list[torch.Tensor]:
    return full_size.decoded(None)


@pytest.fixture(scope="module")
def noise(stock: list[torch.Tensor]) -> Difference:
    """Of stock from stock: the same texts among 256 and among 64."""
    many, few = stock
    return Difference.of([many[: len(few)]], [few])


@pytest.mark.parametrize(("interval", "caching"), [(8, False), (8, True), (4, False)])
def test_deferred_is_as_near_to_stock_as_stock_to_itself(full_size, stock, noise, interval, caching):
    deferred = full_size.decoded(interval, enable_prefix_caching=caching)
    for ours, theirs in zip(deferred, stock, strict=True):
        difference = Difference.of([ours], [theirs])
        assert difference.within(Difference(2 * noise.largest, 1.5 * noise.mean)), (difference, noise)


def test_a_missing_merge_shows(full_size, stock, noise):
    forgetful = full_size.decoded(8, fault="without_merge")
    assert Difference.of(forgetful, stock).mean > 3 * noise.mean

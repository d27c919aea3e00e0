"""What does not fit a GPU is refused before it is loaded, from vLLM's configuration and the files' sizes."""

import os
import shutil
from pathlib import Path

import pytest

from service.config import ConfigError
from service.engine.memory import request_bytes
from service.engine.vllm_engine import engine_args, engine_config
from service.pools import PoolConfig

CONTEXT = 4096


def pool(model: Path, **settings: object) -> PoolConfig:
    arguments = {"max_model_len": CONTEXT, "kv_cache_memory_bytes": 2**24, "mamba_ssm_cache_dtype": "float32"}
    return PoolConfig.model_validate(
        {"name": "p", "model": str(model), "accelerator": "RTX4090", "gpus_per_replica": 1}
        | {"engine_args": arguments | settings.pop("engine_args", {})}  # type: ignore[operator]
        | settings
    )


def test_a_request_by_hand(demo_model: Path) -> None:
    """One attention layer with two KV heads of 64 in bf16; three of GDN with eight heads of 64 by 64 in fp32,
    and a convolution over 4 tokens of 2 * 4 * 64 + 8 * 64 channels, which keeps three."""
    attention = CONTEXT * 2 * 2 * 64 * 2
    recurrent = 3 * (8 * 64 * 64 * 4 + 3 * (2 * 4 * 64 + 8 * 64) * 2)
    assert request_bytes(engine_args(pool(demo_model)).create_engine_config()) == attention + recurrent


@pytest.fixture
def large_model(demo_model: Path, tmp_path: Path) -> Path:
    """The demo model with 30 GiB of weights, of which the file system holds only the beginning."""
    shutil.copytree(demo_model, tmp_path / "large")
    os.truncate(tmp_path / "large" / "model.safetensors", 30 * 2**30)
    return tmp_path / "large"


def test_weights_that_do_not_fit(large_model: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        engine_config(pool(large_model))
    assert "expected weights and one request to fit 22.1 GiB of a RTX4090; got 30.0 GiB" in str(refusal.value)
    engine_config(pool(large_model, accelerator="H200"))
    two = pool(large_model, gpus_per_replica=2, engine_args={"tensor_parallel_size": 2})
    engine_config(two)
    engine_config(pool(large_model, accelerator=None, gpus_per_replica=0))

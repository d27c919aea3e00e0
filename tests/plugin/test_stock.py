"""Installed without the section, vLLM is stock: classes, shapes and outputs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import engines  # noqa: F401  (sets the environment before vLLM is imported)
import pytest
import torch

REPORT = """
import json, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from engines import engine, random_texts, teacher_forced, worker_model

with engine(Path({model!r}), None, max_num_batched_tokens=64) as llm:
    logprobs = teacher_forced(llm, random_texts([3, 70, 100], tokens=20, seed=1))
    config = llm.llm_engine.vllm_config
    context = config.compilation_config.static_forward_context
    layers = {{name: layer for name, layer in context.items() if hasattr(layer, "get_attn_backend")}}
    print("REPORT", json.dumps({{
        "model": str(type(worker_model(llm))),
        "layers": {{name: str(type(layer)) for name, layer in layers.items()}},
        "backends": {{name: str(layer.get_attn_backend()) for name, layer in layers.items()}},
        "states": {{name: [list(s.shape) for s in layer.kv_cache]
                   for name, layer in layers.items() if isinstance(layer.kv_cache, tuple)}},
        "worker": str(config.parallel_config.worker_cls) + str(config.parallel_config.worker_extension_cls),
        "block_size": config.cache_config.block_size,
        "logprobs": [text.tolist() for text in logprobs],
    }}))
"""


def report(model: Path, environment: dict[str, str]) -> dict:
    script = REPORT.format(here=str(Path(__file__).parent), model=str(model))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("REPORT "))


def test_without_the_section_nothing_differs(demo_model):
    installed = report(demo_model, {})
    absent = report(demo_model, {"VLLM_PLUGINS": ""})
    assert "deltalog" not in str({**installed, "logprobs": None})
    assert installed == absent


def test_without_the_section_pooling_adapters_work():
    """They derive from the registered class, ours, and need their own class for their own methods."""
    from vllm.model_executor.models.adapters import as_embedding_model
    from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM

    from deltalog_kernels.vllm_plugin.models import DeltaLogQwen3NextForCausalLM

    no_section = SimpleNamespace(additional_config={})
    for registered in (Qwen3NextForCausalLM, DeltaLogQwen3NextForCausalLM):
        adapter = as_embedding_model(registered)
        # What vLLM builds the layers of is not the point here, and needs a distributed environment.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Qwen3NextForCausalLM, "__init__", lambda self, **_: torch.nn.Module.__init__(self))
            patch.setattr(adapter, "_init_pooler", lambda self, *_, **__: None)
            assert type(adapter(vllm_config=no_section)) is adapter

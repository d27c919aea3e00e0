"""`deltalog doctor MODEL` says what the engine then does."""

import json
from pathlib import Path

from engines import engine
from typer.testing import CliRunner

from deltalog_kernels.cli import app
from deltalog_kernels.vllm_plugin.diagnosis import diagnose


def test_its_numbers_are_the_engines(engine_model: Path):
    found = diagnose(engine_model, "auto")
    with engine(engine_model, "auto") as llm:
        context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        layers = [layer for layer in context.values() if hasattr(layer, "memory")]
        [counters] = llm.collective_rpc("deltalog_counters")
    assert found.aside is None
    assert found.layers == len(layers)
    assert {layer.layout for layer in layers} == {found.layout}
    assert counters["merge_interval"] == found.layout.merge_interval
    base, *log = layers[0].memory.pools
    assert found.base_bytes == len(layers) * base[0].numel() * base.element_size()
    assert found.log_bytes == len(layers) * sum(part[0].numel() * part.element_size() for part in log)


def test_it_prints_them(demo_model: Path):
    done = CliRunner().invoke(app, ["doctor", str(demo_model), "--merge-interval", "4"])
    assert done.exit_code == 0, done.output
    assert "Qwen3NextForCausalLM: 3 gdn layers decode with a log" in done.output
    assert "M = 4: as asked; auto would take 8" in done.output
    assert "0.38 MiB base" in done.output


def test_a_model_without_recurrent_layers_and_a_wrong_interval(tmp_path: Path, demo_model: Path):
    config = json.loads((demo_model / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    aside = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert aside.exit_code == 0, aside.output
    assert "decodes as stock vLLM: expected a model with architecture" in aside.output
    refused = CliRunner().invoke(app, ["doctor", str(demo_model), "--merge-interval", "0"])
    assert refused.exit_code == 1
    assert "problem: " in refused.output
    assert "got 0" in refused.output

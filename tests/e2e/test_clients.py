"""Load clients and an API tester of others, run as they are."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from running_service import RunningService, configuration, running
from tools import AIPERF, HOOKS, SCHEMATHESIS, installed, run

from service.keys import new_key

Record = Callable[[str, object], None]
UNCHECKED = "positive_data_acceptance,negative_data_rejection"
REQUESTS, CONCURRENT, PROMPT_TOKENS, TOKENS = 60, 8, 64, 48

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def test_vllm_bench_serve(
    service: RunningService, demo_model: Path, tmp_path: Path, record_property: Record
) -> None:
    vllm = Path(sys.executable).with_name("vllm")
    command = [
        vllm,
        "bench",
        "serve",
        "--base-url",
        service.url,
        "--model",
        "demo",
        "--tokenizer",
        demo_model,
    ]
    load = ["--dataset-name", "random", "--random-input-len", PROMPT_TOKENS, "--random-output-len", TOKENS]
    bounds = ["--num-prompts", REQUESTS, "--max-concurrency", CONCURRENT, "--ignore-eos"]
    run([*command, *load, *bounds, "--save-result", "--result-filename", "result.json"], tmp_path, 600)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == REQUESTS * TOKENS
    figures = f"{result['output_throughput']:.0f} tokens/s, TPOT {result['mean_tpot_ms']:.1f} ms"
    record_property("result", f"{REQUESTS} of {REQUESTS} completed, {CONCURRENT} at a time: {figures} (mean)")


def test_aiperf(service: RunningService, demo_model: Path, tmp_path: Path, record_property: Record) -> None:
    command = [installed(AIPERF) / "aiperf", "profile", "--url", service.url, "--model", "demo"]
    kind = ["--endpoint-type", "chat", "--streaming", "--tokenizer", demo_model, "--ui", "none"]
    load = ["--request-count", REQUESTS, "--concurrency", CONCURRENT, "--isl", PROMPT_TOKENS, "--osl", TOKENS]
    options = ["--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--artifact-dir", tmp_path]
    run([*command, *kind, *load, *options], tmp_path, 600)
    result = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert (result["request_count"]["avg"], result["error_summary"]) == (REQUESTS, [])
    assert result["total_usage_completion_tokens"]["avg"] == REQUESTS * TOKENS
    figures = f"{result['output_token_throughput']['avg']:.0f} tokens/s"
    record_property("result", f"{REQUESTS} of {REQUESTS} completed, {CONCURRENT} at a time: {figures}")


def test_schemathesis_finds_nothing(demo_model: Path, tmp_path: Path, record_property: Record) -> None:
    """With a key, against a short context, so that what runs to its end does so soon.

    Left out is whether exactly what fits the schema is taken: vocabulary and context length are the model's,
    and vLLM takes `false` for the token 0.
    """
    key, sha256 = new_key()
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": [{"name": "st", "sha256": sha256}]}))
    (tmp_path / "hooks.py").write_text(HOOKS)
    config = configuration(demo_model, engine_args={"max_model_len": 128})
    with running(config | {"keys_file": str(tmp_path / "keys.yaml")}, tmp_path) as service:
        command = [installed(SCHEMATHESIS) / "st", "--no-color", "run", f"{service.url}/openapi.json"]
        options = ["--exclude-checks", UNCHECKED, "--seed", 1, "--max-examples", 200]
        header = ["--header", f"Authorization: Bearer {key}", "--request-timeout", 60]
        environment = {"SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(tmp_path)}
        said = run([*command, *options, *header], tmp_path, 1500, **environment)
    (cases,) = re.findall(r"(\d+) generated", said)
    assert int(cases) > 1000
    record_property("result", f"{cases} cases, nothing found")

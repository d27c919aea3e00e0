"""Services that must not come up: they end at once, say why and what to do, and leave nothing behind."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from running_service import MARK, ROOT, configuration, descendants, running
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from waiting import until

from service.config import ConfigError, parse_config
from service.engine.vllm_engine import engine_args
from service.launch import check_engines
from service.metrics.log import ASIDE


def run(command: str, config: dict[str, Any], folder: Path) -> "subprocess.CompletedProcess[str]":
    """`python -m service COMMAND` to its end; nothing that it started may outlive it."""
    path = folder / "service.yaml"
    path.write_text(yaml.safe_dump(config))
    ended = subprocess.run(
        [sys.executable, "-m", "service", command, str(path)],
        cwd=ROOT,
        env=os.environ | {MARK: str(folder)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    until(lambda: not descendants(folder), 30, "everything to be gone")
    return ended


def refusal(ended: "subprocess.CompletedProcess[str]") -> str:
    """What a person reads on standard error, in words and not as a traceback."""
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    return ended.stderr.partition("error: ")[2]


@pytest.fixture(scope="module")
def dense_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of an architecture without recurrent layers."""
    folder = tmp_path_factory.mktemp("dense")
    PreTrainedTokenizerFast.from_pretrained(demo_model).save_pretrained(folder)
    shape = Qwen3Config(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    Qwen3ForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_an_architecture_without_a_log_is_served_as_stock(dense_model: Path, tmp_path: Path) -> None:
    """With as little in its configuration as there can be."""
    full = configuration(dense_model)
    (pool,) = full["pools"]
    few = {name: pool[name] for name in ("name", "model", "served_model_name", "merge_interval")}
    with running(full | {"pools": [few]}, tmp_path) as service:
        answer = service.post("completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 3
        until(lambda: service.scrape().total(ASIDE) == 1, 30, "the replica to say so")


@pytest.mark.parametrize(
    ("setting", "host", "family"),
    [
        ("port", "127.0.0.1", socket.AF_INET),
        ("port", "::1", socket.AF_INET6),
        ("metrics_port", "127.0.0.1", socket.AF_INET),
    ],
)
def test_a_port_in_use(
    demo_model: Path, tmp_path: Path, setting: str, host: str, family: socket.AddressFamily
) -> None:
    config = configuration(demo_model)
    with socket.create_server((host, config[setting]), family=family):
        said = refusal(run("serve", config | {"host": host}, tmp_path))
    assert said.startswith(f"{setting}: expected to listen on ")
    assert f"port {config[setting]}; got: Address already in use" in said
    assert f"set `{setting}` to another" in said


@pytest.mark.parametrize(
    ("host", "reason"),
    [("nowhere.invalid", "not known"), ("203.0.113.1", "Cannot assign requested address")],
)
def test_a_host_that_is_not_here(demo_model: Path, tmp_path: Path, host: str, reason: str) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{name: anna, sha256: {'0' * 64}}}]\n")
    config = configuration(demo_model) | {"host": host, "keys_file": str(keys)}
    said = refusal(run("serve", config, tmp_path))
    assert said.startswith(f"port: expected to listen on {host}, port ")
    assert reason in said
    assert "correct `host`" in said
    assert "in use" not in said


@pytest.mark.parametrize(
    ("command", "value"), [("serve", 0), ("serve", 3.5), ("serve", "fast"), ("validate", 0), ("demo", 0)]
)
def test_a_bad_merge_interval(demo_model: Path, tmp_path: Path, command: str, value: object) -> None:
    said = refusal(run(command, configuration(demo_model, merge_interval=value), tmp_path))
    assert 'pools[0].merge_interval: expected "auto" or an integer from 1' in said
    assert f"got {value!r}" in said


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    said = refusal(run("serve", configuration(tmp_path / "absent"), tmp_path))
    assert "model: expected a directory" in said


def test_pools_that_no_node_can_run(demo_model: Path, tmp_path: Path) -> None:
    """Serve would wait for them without a word."""
    config = configuration(demo_model, cpus_per_replica=10_000)
    config["pools"].append({"name": "rack", "model": str(demo_model), "node_labels": {"rack": "7"}})
    said = refusal(run("serve", config, tmp_path))
    assert "pool 'test': expected a node with 10000 CPU for a replica" in said
    assert "pool 'rack': expected a node with the labels rack=7" in said


def test_the_demo_does_not_take_another_service_for_its_own(demo_model: Path, tmp_path: Path) -> None:
    config = configuration(demo_model)
    with socket.create_server(("127.0.0.1", config["port"])):
        said = refusal(run("demo", config, tmp_path))
    assert said.startswith("port: expected to listen on ")


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"engine_args": {"max_model_len": "lots"}}, "max_model_len"),
        ({"engine_args": {"max_num_seqs": -1}}, "max_num_seqs"),
        ({"engine_args": {"tensor_parallel_size": 2}}, "DeltaLog expects one rank"),
        (
            {
                "engine_args": {
                    "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
                }
            },
            "DeltaLog expects no KV connector",
        ),
    ],
)
def test_validate_refuses_what_would_not_start(demo_model: Path, wrong: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=f"pool 'test': engine_args: .*{re.escape(what)}"):
        check_engines(parse_config(configuration(demo_model, **wrong), "test"), thoroughly=True)


def test_validate_looks_for_the_model(tmp_path: Path) -> None:
    said = refusal(run("validate", configuration(tmp_path / "absent"), tmp_path))
    assert "model: expected a directory" in said


def test_validate_knows_vllms_arguments(demo_model: Path, tmp_path: Path) -> None:
    assert run("validate", configuration(demo_model), tmp_path).returncode == 0
    for wrong, what in (
        (
            {"engine_args": {"max_model_length": 1}},
            "expected arguments of vLLM's AsyncEngineArgs; got 'max_m",
        ),
        ({"tool_call_parser": "none"}, "tool_call_parser: expected one of .*hermes.*; got 'none'"),
    ):
        (pool,) = parse_config(configuration(demo_model, **wrong), "test").pools
        with pytest.raises(ConfigError, match=what):
            engine_args(pool)

"""Configuration files: what is accepted, and what a refusal says."""

from pathlib import Path
from typing import Any

import pytest

from service.config import ConfigError, ServiceConfig, load_config, parse_config

SLO = {"tpot_ms": 25, "ttft_ms": 1000}
COST = {"fixed_ms": 10, "row_ms": 0.1, "state_ms": 0.1, "prefill_token_ms": 0.02}
POOL = {"name": "p", "model": "some/model"}
SIM = {"fixed_ms": 1, "per_row_ms": 0.1, "per_prefill_token_ms": 0}
SHIPPED = sorted((Path(__file__).parents[2] / "deploy" / "serve").glob("*.yaml"))


def pool_with(**values: Any) -> dict[str, Any]:
    return {"pools": [POOL | values]}


def test_a_pool_needs_only_a_name_and_a_model() -> None:
    config = parse_config({"pools": [POOL]}, "test")
    (pool,) = config.pools
    assert (config.host, config.port) == ("127.0.0.1", 8000)
    assert pool.merge_interval is None
    assert pool.model_id == "some/model"


def test_requests_may_know_the_model_by_another_name() -> None:
    (pool,) = parse_config(pool_with(served_model_name="short"), "test").pools
    assert pool.model_id == "short"


@pytest.mark.parametrize("value", [1, 8, "auto", None])
def test_merge_interval_accepts(value: object) -> None:
    assert parse_config(pool_with(merge_interval=value), "test").pools[0].merge_interval == value


@pytest.mark.parametrize("value", [0, -1, 3.5, 8.0, "fast", "8", True, [8]])
def test_merge_interval_refuses(value: object) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_config(pool_with(merge_interval=value), "demo.yaml")
    message = str(refusal.value)
    assert message.startswith('demo.yaml: pools[0].merge_interval: expected "auto" or an integer from 1')
    assert f"got {value!r}; use" in message


@pytest.mark.parametrize(
    ("values", "where", "what"),
    [
        ({}, "pools", "expected a value; got nothing"),
        ({"pools": []}, "pools", "expected a list of pools, one at least; got none"),
        ({"pools": "p"}, "pools", "expected a list of pools, one at least; got str"),
        ({"pools": [POOL, POOL]}, "(top level)", "expected a name for each; got 'p' twice"),
        ({"pools": [POOL | {"share": 0.5}]}, "(top level)", "a first pool without one"),
        (
            {"pools": [POOL, POOL | {"name": "q", "share": 0.6}, POOL | {"name": "r", "share": 0.4}]},
            "(top level)",
            "expected shares of 'some/model' below 1",
        ),
        (
            {"pools": [POOL, POOL | {"name": "q", "slo": SLO, "cost": COST}]},
            "(top level)",
            "expected one `slo` for all pools of 'some/model'",
        ),
        ({"pools": [POOL | {"slo": SLO}]}, "pools[0]", "expected the `cost` of a step"),
        ({"pools": [POOL | {"max_replicas": 2}]}, "pools[0]", "expected an `slo` to scale by"),
        (
            {"pools": [POOL | {"slo": SLO, "cost": COST, "replicas": 3, "max_replicas": 2}]},
            "pools[0]",
            "expected 3 or more; got 2",
        ),
        ({"pools": [POOL | {"advisory": True}]}, "pools[0]", "expected `max_replicas` beside it"),
        (
            {"pools": [POOL | {"accelerator": "4090"}]},
            "pools[0].accelerator",
            "expected one of H200, RTX4090",
        ),
        ({"pools": [POOL | {"accelerator": "H200"}]}, "pools[0]", "gpus_per_replica: expected 1"),
        (
            {"pools": [POOL | {"gpus_per_replica": 1, "engine_args": {"tensor_parallel_size": 2}}]},
            "pools[0]",
            "gpus_per_replica: expected 2",
        ),
        (
            {"pools": [POOL | {"cpus_per_replica": 1.5}]},
            "pools[0].cpus_per_replica",
            "a whole number, or 0.001 to 1",
        ),
        ({"pools": [POOL], "prot": 1}, "prot", "expected one of host, port, metrics_port"),
        ({"pools": [POOL], "port": 0}, "port", "greater than or equal to 1; got 0"),
        ({"pools": [POOL], "port": "8000"}, "port", "valid integer; got '8000'"),
        (pool_with(replica=2), "pools[0].replica", "expected one of name, model"),
        (pool_with(name="a/b"), "pools[0].name", "expected letters, digits, - and _"),
        (pool_with(name="ingress"), "pools[0].name", "got 'ingress'; choose another name"),
        ({"pools": [POOL], "drain_timeout_s": float("inf")}, "drain_timeout_s", "finite number; got inf"),
        (pool_with(cpus_per_replica=0), "pools[0].cpus_per_replica", "got 0"),
        (pool_with(engine_args={"model": "x"}), "pools[0].engine_args", "use the pool's own key 'model'"),
        (
            pool_with(engine_args={"additional_config": {}}),
            "pools[0].engine_args",
            "use the pool's own key 'merge_interval'",
        ),
        ({"pools": [POOL], "metrics_port": 8000}, "(top level)", "expected two ports; got 8000 twice"),
        (["pools"], "(top level)", "got ['pools']"),
        (None, "(top level)", "got None"),
        (
            {"pools": [POOL], "host": "0.0.0.0"},
            "(top level)",
            "keys_file: expected API keys, because 0.0.0.0",
        ),
        ({"pools": [POOL], "host": "192.0.2.1"}, "(top level)", "got none; set it, or listen on 127.0.0.1"),
        (pool_with(sim={"fixed_ms": 1}), "pools[0].sim.per_row_ms", "expected a value; got nothing"),
        (pool_with(sim=SIM | {"rows": 1}), "pools[0].sim.rows", "expected one of fixed_ms, per_row_ms"),
        (pool_with(sim=SIM, merge_interval=8), "pools[0]", "expected none of engine_args, merge_interval"),
        (pool_with(sim=SIM, tool_call_parser="hermes"), "pools[0]", "which has no vLLM; got both"),
    ],
    ids=str,
)
def test_a_refusal_says_where_and_what(values: object, where: str, what: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_config(values, "demo.yaml")
    assert str(refusal.value).startswith(f"demo.yaml: {where}: ")
    assert what in str(refusal.value)


def test_every_fault_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_config({"port": 0, "host": 1, "pools": [POOL]}, "demo.yaml")
    assert len(str(refusal.value).splitlines()) == 2


@pytest.mark.parametrize("text", [b"pools: [", b"\xff\xfe\x00", None], ids=["not YAML", "not text", "absent"])
def test_an_unreadable_file_is_named(tmp_path: Path, text: bytes | None) -> None:
    path = tmp_path / "service.yaml"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match=r"service\.yaml: expected a readable YAML file; got"):
        load_config(path)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configurations_are_valid(path: Path) -> None:
    assert load_config(path).pools


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_this_machine_needs_no_keys(host: str) -> None:
    assert parse_config({"pools": [POOL], "host": host}, "test").is_local


def test_a_configuration_cannot_be_changed() -> None:
    config = parse_config({"pools": [POOL]}, "test")
    with pytest.raises(ValueError, match="frozen"):
        config.port = 1  # type: ignore[misc]


def test_every_setting_is_described() -> None:
    schema = ServiceConfig.model_json_schema()
    models = [schema, *schema["$defs"].values()]
    undescribed = [
        name for model in models for name, field in model["properties"].items() if "description" not in field
    ]
    assert not undescribed


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:8000"), ("::1", "http://[::1]:8000")]
)
def test_a_url_can_be_used_as_it_is(host: str, url: str) -> None:
    assert parse_config({"host": host, "pools": [POOL]}, "test").url == url


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("port: 8000\npools: []\nport: 8001\n")
    with pytest.raises(ConfigError, match=r"twice.yaml: .* got: the key 'port' a second time in line 3"):
        load_config(path)


def test_the_schema_knows_the_keys() -> None:
    """What an editor would check a file by; it says no to what we say no to."""
    schema = ServiceConfig.model_json_schema()
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["PoolConfig"]["required"] == ["name", "model"]
    described = [each.get("description") for each in schema["$defs"]["PoolConfig"]["properties"].values()]
    assert all(described)

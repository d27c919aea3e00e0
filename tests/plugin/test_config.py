"""Bad configurations are refused where the engine's configuration is made, before anything starts."""

import json
import re
from pathlib import Path

import engines  # noqa: F401  (sets the environment before vLLM is imported)
import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from deltalog_kernels.vllm_plugin.config import DeltaLogConfig, check_merge_interval
from deltalog_kernels.vllm_plugin.pages import recurrent_layout
from deltalog_kernels.vllm_plugin.support import aside

EIGHT = {"merge_interval": 8}


def configure(model: Path, section: object, **options):
    return EngineArgs(
        str(model), max_model_len=512, additional_config={"deltalog": section}, **options
    ).create_engine_config()


@pytest.fixture(scope="module")
def dense_model(tmp_path_factory, demo_model) -> Path:
    """A Qwen3 configuration: no recurrent layer anywhere. Weights are never asked for."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
    }
    directory = tmp_path_factory.mktemp("dense")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("value", [0, -1, 65, 3.5, 8.0, True, "fast", "8", None, [8]])
def test_merge_interval_must_be_auto_or_a_small_integer(demo_model, value):
    refusal = f'expected "auto" or an integer from 1 (write-through) to 64, got {value!r}; use "auto"'
    with pytest.raises(
        ValueError, match=re.escape(f"additional_config['deltalog']: merge_interval: {refusal}")
    ):
        configure(demo_model, {"merge_interval": value})


@pytest.mark.parametrize("value", [1, 2, 64, "auto"])
def test_good_merge_intervals_are_kept(value):
    assert check_merge_interval(value) == DeltaLogConfig(merge_interval=value).merge_interval == value


def test_auto_is_eight_for_the_demo_model(demo_model):
    assert recurrent_layout(configure(demo_model, {"merge_interval": "auto"})).merge_interval == 8
    assert DeltaLogConfig().merge_interval == "auto"


def test_unknown_keys_and_non_objects_are_refused(demo_model):
    with pytest.raises(
        ValueError, match=r"merge_intervall: unknown key \(got 8\); the known keys are: merge_"
    ):
        configure(demo_model, {"merge_intervall": 8})
    with pytest.raises(ValueError, match=r"expected an object such as .* got 8"):
        configure(demo_model, 8)


def test_an_architecture_without_a_log_is_left_to_vllm(dense_model):
    config = configure(dense_model, EIGHT)
    reason = aside(config)
    assert reason.startswith("expected a model with architecture Qwen3NextForCausalLM, ")
    assert reason.endswith(", got Qwen3ForCausalLM")
    assert recurrent_layout(config) is None


def test_the_same_architecture_without_the_section_is_left_alone(dense_model):
    config = EngineArgs(str(dense_model), max_model_len=512).create_engine_config()
    assert config.parallel_config.worker_extension_cls == ""


def test_a_kv_connector_is_refused(demo_model):
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    with pytest.raises(
        ValueError, match=r"expects no KV connector .* got ExampleConnector; drop --kv-transfer-c"
    ):
        configure(demo_model, EIGHT, kv_transfer_config=connector)


def test_kv_offloading_is_a_connector_too(demo_model):
    with pytest.raises(ValueError, match=r"expects no KV connector .* drop .* --kv-offloading-size"):
        configure(demo_model, EIGHT, kv_offloading_size=1.0)


@pytest.mark.skipif(current_platform.is_cuda(), reason="there vLLM first wants as many GPUs")
@pytest.mark.parametrize("kind", ["tensor", "pipeline", "data"])
def test_several_ranks_are_refused(demo_model, kind):
    with pytest.raises(ValueError, match=f"expects one rank, .*got .*'{kind}': 2"):
        configure(demo_model, EIGHT, **{f"{kind}_parallel_size": 2})


def test_another_worker_extension_is_refused(demo_model):
    with pytest.raises(
        ValueError, match=r"only worker extension .* got some.Extension; drop --worker-extension"
    ):
        configure(demo_model, EIGHT, worker_extension_cls="some.Extension")


def test_another_dtype_is_refused(demo_model):
    with pytest.raises(
        ValueError, match=r"expects dtype bfloat16 .* got torch.float32; pass --dtype bfloat16"
    ):
        configure(demo_model, EIGHT, dtype="float32")

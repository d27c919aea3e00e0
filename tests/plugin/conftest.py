import json
from pathlib import Path

import pytest
import torch
from torch import Tensor


@pytest.fixture
def poisoned_pages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fill every state page with NaN bit patterns when a DeltaLog layer binds it; lists those layers."""
    from deltalog_kernels.vllm_plugin.layers import LoggedLayer

    bind, bound = LoggedLayer.bind_kv_cache, []

    def poison_and_bind(self: LoggedLayer, kv_cache: Tensor) -> None:
        kv_cache.fill_(-1)  # int8: 0xFF in every byte is NaN in bf16 and fp32
        bind(self, kv_cache)
        bound.append(self.prefix)

    monkeypatch.setattr(LoggedLayer, "bind_kv_cache", poison_and_bind)
    return bound


KIMI = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 4,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
    # All experts, as in the demo model: a hard choice would turn rounding into jumps.
    "num_experts": 4,
    "num_experts_per_token": 4,
    "num_shared_experts": 1,
    "moe_intermediate_size": 128,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "model_max_length": 4096,
    "torch_dtype": "bfloat16",
}


# Text only, as a checkpoint of Qwen3.6-35B-A3B is served without its vision tower.
QWEN35 = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
    "attn_output_gate": True,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

CONFIGURATIONS = {"qwen3_5": QWEN35, "kimi": KIMI}
KINDS = {"qwen": "Qwen3NextForCausalLM"} | {
    kind: config["architectures"][0] for kind, config in CONFIGURATIONS.items()
}


def verified_kinds() -> list[str]:
    from deltalog_kernels.vllm_plugin.seams import VERIFIED

    here = VERIFIED["cuda" if torch.cuda.is_available() else "cpu"]
    return [kind for kind, architecture in KINDS.items() if architecture in here]


@pytest.fixture(scope="session", params=verified_kinds())
def engine_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, and on a GPU also others of its size, once they are verified there."""
    if request.param == "qwen":
        return request.getfixturevalue("demo_model")
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_text(json.dumps(CONFIGURATIONS[request.param]))
    return folder

"""Random weights of a trained model's scale, for a model of which only the configuration is at hand.

vLLM's own dummy weights are about 1e-3: hidden states vanish, every logit is alike and a router sends all
tokens to a few experts, so neither outputs nor times say anything. Here each projection has unit gain, a
router spreads, and the same parameter is the same in every engine.
"""

import math
from zlib import crc32

import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

LOAD_FORMAT = "deltalog_seeded"
SLOWEST, FASTEST = 0.999, 0.5
"""Decay of a head for an average token, from a few pages of memory to a word."""
FP8_BLOCK = 128  # vLLM's block-wise fp8 checkpoints scale blocks of 128 by 128


@register_model_loader(LOAD_FORMAT)
class SeededLoader(DummyModelLoader):
    """``--load-format deltalog_seeded``: for one rank, in bf16 or block-wise fp8."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        for module_name, module in model.named_modules():
            kind = type(module).__name__
            for name, parameter in module.named_parameters(recurse=False):
                weight = parameter.data
                if weight.is_meta:
                    raise ValueError(
                        f"{LOAD_FORMAT}: expected weights that vLLM does not quantise while loading, got "
                        f"{module_name}.{name} on the meta device; drop --quantization"
                    )
                if "Norm" in kind:
                    weight.fill_(0 if kind == "GemmaRMSNorm" else 1)  # the identity: that one adds 1 itself
                else:
                    _draw(f"{module_name}.{name}", weight)


@torch.no_grad()
def _draw(name: str, weight: Tensor) -> None:
    generator = torch.Generator(device=weight.device).manual_seed(crc32(name.encode()))

    def normal(part: Tensor, std: float) -> None:
        part.copy_(torch.randn(part.shape, generator=generator, device=weight.device) * std)

    if name.endswith("A_log"):
        # decay = exp(-exp(A_log) * softplus(a + dt_bias)); softplus(0) = ln 2.
        decays = torch.linspace(math.log(SLOWEST), math.log(FASTEST), weight.numel(), device=weight.device)
        weight.copy_((-decays / math.log(2)).log().view_as(weight))
    elif name.endswith("weight_scale_inv"):
        weight.fill_((weight.shape[-1] * FP8_BLOCK) ** -0.5)
    elif weight.dim() < 2:
        weight.zero_()  # biases
    elif "embed_tokens" in name:
        normal(weight, 1.0)
    else:
        fp8, head = weight.dtype == torch.float8_e4m3fn, "lm_head" in name
        std = 1.0 if fp8 else (3.0 if head else 1.0) * weight.shape[-1] ** -0.5
        for part in weight.flatten(0, -3) if weight.dim() > 2 else [weight]:  # an expert at a time
            normal(part, std)

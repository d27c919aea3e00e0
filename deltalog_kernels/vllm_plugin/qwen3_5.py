"""Qwen3.5 and 3.6 with a log: dense and mixture of experts, with and without vision."""

from vllm.model_executor.models import qwen3_5 as stock_models

from deltalog_kernels.vllm_plugin.models import LoggedModel


class DeltaLogQwen35ForCausalLM(LoggedModel, stock_models.Qwen3_5ForCausalLM):
    stock = stock_models.Qwen3_5ForCausalLM


class DeltaLogQwen35MoeForCausalLM(LoggedModel, stock_models.Qwen3_5MoeForCausalLM):
    stock = stock_models.Qwen3_5MoeForCausalLM


class DeltaLogQwen35ForConditionalGeneration(LoggedModel, stock_models.Qwen3_5ForConditionalGeneration):
    stock = stock_models.Qwen3_5ForConditionalGeneration


class DeltaLogQwen35MoeForConditionalGeneration(LoggedModel, stock_models.Qwen3_5MoeForConditionalGeneration):
    stock = stock_models.Qwen3_5MoeForConditionalGeneration

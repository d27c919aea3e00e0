"""Models whose state pages hold a log. vLLM finds them under their stock architecture name."""

from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM

from deltalog_kernels.vllm_plugin.layers import LoggedLayer
from deltalog_kernels.vllm_plugin.pages import log_states, recurrent_layout


class LoggedModel:
    """Mixed into a model of vLLM's: its state pages are sized for a log and moved with it."""

    stock: ClassVar[type[Any]]
    vllm_config: VllmConfig

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        layout, stock = recurrent_layout(vllm_config), self.stock
        if layout is None and stock in type(self).__bases__:
            # vLLM finds this class for every engine of the process; this one did not ask for a log. A
            # pooling adapter derives from it, and then has only methods that answer as stock.
            self.__class__ = stock
        stock.__init__(self, vllm_config=vllm_config, prefix=prefix)
        self.vllm_config = vllm_config
        if layout is not None:
            self._check_pages(vllm_config)

    def _check_pages(self, vllm_config: VllmConfig) -> None:
        """vLLM itself notices a disagreement only where padding does not absorb it."""
        sized = self.get_mamba_state_shape_from_config(vllm_config)
        assert isinstance(self, torch.nn.Module)
        for layer in self.modules():
            if isinstance(layer, LoggedLayer) and tuple(layer.get_state_shape()) != sized:
                raise RuntimeError(
                    f"{layer.prefix}: the layer's states {tuple(layer.get_state_shape())} are not those that "
                    f"the model's page was sized for, {sized}"
                )

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        layout = recurrent_layout(vllm_config)
        states = cls.stock.get_mamba_state_dtype_from_config(vllm_config)
        return states if layout is None else (*states, *log_states(layout)[1])

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        layout = recurrent_layout(vllm_config)
        states = cls.stock.get_mamba_state_shape_from_config(vllm_config)
        return states if layout is None else (*states, *log_states(layout)[0])

    def get_mamba_state_copy_funcs(self, mamba_types: set[Any]) -> dict[Any, tuple[Any, ...]]:
        """A log moves with its base when prefix caching copies a page to the next block.

        An instance method over vLLM's classmethod, because only an instance knows whether it has a log.
        """
        layout = recurrent_layout(self.vllm_config)
        conv, temporal = self.stock.get_mamba_state_copy_func()
        logs = () if layout is None else log_states(layout)[0]
        return {mamba_type: (conv, temporal, *[temporal] * len(logs)) for mamba_type in mamba_types}


class DeltaLogQwen3NextForCausalLM(LoggedModel, Qwen3NextForCausalLM):
    """Qwen3-Next with a log."""

    stock = Qwen3NextForCausalLM

"""Kimi-Linear: the KDA layer with a log, and the model whose pages hold it. NVIDIA GPUs only, as in vLLM."""

from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
from vllm.models.kimi_k3 import KimiLinearForCausalLM

from deltalog_kernels import kda_fused_step
from deltalog_kernels.vllm_plugin.layers import LoggedLayer
from deltalog_kernels.vllm_plugin.metadata import DeltaLogGDNMetadata
from deltalog_kernels.vllm_plugin.models import LoggedModel


@PluggableLayer.register_oot(name="KimiGatedDeltaNetAttention")
class DeltaLogKimiKDA(LoggedLayer, KimiGatedDeltaNetAttention):
    """KimiGatedDeltaNetAttention with a log. Decode rows of a mixed batch are decoded, not prefilled."""

    stock = KimiGatedDeltaNetAttention

    @eager_break_during_capture
    def _forward(
        self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor
    ) -> None:
        """vLLM's seam: convolution, recurrence and gated norm of one step.

        mixed_qkv [tokens, 3 H K], g1 and core_attn_out [1, tokens, H, K], g2 [tokens, H, K], beta
        [1, tokens, H].
        """
        metadata = self.step_metadata()
        if metadata is None or not self.layout.capacity:
            super()._forward(mixed_qkv, g1, g2, beta, core_attn_out)
            return
        decodes = metadata.num_decodes
        # A batch that a FULL CUDA graph decodes is padded; the slots of its padding are null.
        rows = decodes if metadata.num_prefills else metadata.num_actual_tokens
        if rows:
            self._decode(metadata, mixed_qkv[:rows], g1[0, :rows], beta[0, :rows], core_attn_out[0, :rows])
            # Row-contiguous views: vLLM's norm works in place and answers with a view of its own.
            normed = slice(rows if metadata.num_prefills else None)
            decoded = core_attn_out[0, normed]
            decoded.copy_(self.o_norm(decoded, g2[normed]))
        if metadata.prefill_only is not None:
            self.fold(metadata)
            with self.prefill_alone(metadata):
                super()._forward(
                    mixed_qkv[decodes:],
                    g1[:, decodes:],
                    g2[decodes:],
                    beta[:, decodes:],
                    core_attn_out[0, decodes:].unsqueeze(0),
                )

    def _decode(
        self, metadata: DeltaLogGDNMetadata, qkv: Tensor, gate: Tensor, beta: Tensor, out: Tensor
    ) -> None:
        at = self.decode_at(metadata, len(qkv))
        convolved = causal_conv1d_update(
            qkv,
            self.conv_state(),
            self.conv1d.weight.view(self.conv1d.weight.size(0), self.conv1d.weight.size(2)),
            self.conv1d.bias,
            activation="silu",
            conv_state_indices=at["slot_ids"],
            validate_data=False,
            # In place it would overwrite its siblings in the packed projection.
            out=qkv.new_empty(qkv.shape),
        )
        dt_bias = self.dt_bias.view(self.layout.value_heads, self.layout.key_dim)
        kda_fused_step(
            convolved, gate, beta, self.A_log, dt_bias, **at, lower_bound=self.gate_lower_bound, out=out
        )


class DeltaLogKimiLinearForCausalLM(LoggedModel, KimiLinearForCausalLM):
    """Kimi-Linear, its state pages sized for a log and moved with it."""

    stock = KimiLinearForCausalLM

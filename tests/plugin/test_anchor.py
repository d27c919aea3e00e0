"""Against the specification, run inside the engine: the tight anchor beside stock's bf16 one."""

import pytest
import torch
from engines import TO_STOCK, Difference, engine, random_texts, teacher_forced

from deltalog_kernels import gdn_gates
from deltalog_kernels.reference import delta_rule_write_through
from deltalog_kernels.vllm_plugin import layers

CHUNKED = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="puts the reference into vLLM's CPU core; the GPU kernels have fp64 tests",
)
# Only the order of fp32 sums differs, until a bf16 activation rounds the other way: 0.017 on average and
# 0.15 in the farthest of 1.5 million. Twice that:
TO_REFERENCE = Difference(largest=0.3, mean=0.034)


@pytest.fixture(scope="module")
def texts():
    return random_texts([1, 3, 17, 64, 100, 201], tokens=256, seed=21)


def write_through_core(self, metadata, mixed_qkv, b, a, out):
    """forward_core_cpu with the reference in place of log and kernels; the layer must have no log."""
    assert not self.layout.capacity
    decodes = metadata.num_decodes
    if decodes:
        slots = metadata.non_spec_state_indices_tensor[:decodes]
        q, k, v = self.rearrange_mixed_qkv(self._update_conv_cpu(mixed_qkv[:decodes], slots))
        decay_ln, beta = gdn_gates(a[:decodes], b[:decodes], self.A_log, self.dt_bias)
        heads, dims = self.layout.value_heads, (self.layout.key_dim, self.layout.value_dim)
        states = self.kv_cache[1].view(-1, heads, *dims).transpose(-1, -2)
        inputs = (q[0].float(), k[0].float(), v[0].float(), decay_ln[..., None], beta)
        result, states[slots] = delta_rule_write_through(*inputs, state=states[slots], scale=dims[0] ** -0.5)
        out[:decodes] = result.to(out.dtype)
    if metadata.prefill_only is not None:
        end = decodes + metadata.prefill_only.num_prefill_tokens
        parts = (x[decodes:end] for x in (mixed_qkv, b, a, out))
        layers.cpu_ops._cpu_gdn_attention_nonspec(self, metadata.prefill_only, *parts)


@pytest.fixture(scope="module")
def reference(demo_model, texts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers.DeltaLogQwenGDN, "forward_core_cpu", write_through_core)
        with engine(demo_model, 1, **CHUNKED) as llm:
            return teacher_forced(llm, texts)


@pytest.mark.parametrize("interval", [2, 8])
def test_deferred_equals_the_reference(demo_model, texts, reference, poisoned_pages, interval):
    with engine(demo_model, interval, **CHUNKED) as llm:
        deferred = teacher_forced(llm, texts)
    assert Difference.of(deferred, reference).within(TO_REFERENCE)


def test_the_state_matters(demo_model, texts, reference, monkeypatch):
    """A state that is zero at every step moves the mean by ten times what any comparison allows."""
    step = layers.gdn_fused_step

    def forgetful(*args, memory, slot_ids, **kwargs):
        for pool in memory.pools:
            pool[slot_ids.long()] = 0
        return step(*args, memory=memory, slot_ids=slot_ids, **kwargs)

    monkeypatch.setattr(layers, "gdn_fused_step", forgetful)
    with engine(demo_model, 8, **CHUNKED) as llm:
        forgotten = teacher_forced(llm, texts)
    # The first position of each text is prefill's own and remembers.
    moved = torch.cat([a[1:] - b[1:] for a, b in zip(forgotten, reference, strict=True)]).abs().mean().item()
    assert moved > 10 * TO_STOCK.mean

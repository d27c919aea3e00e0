"""Published write-through decode kernels, one token a row, called on the inputs of our own kernels.

Every step normalises and gates in the timed kernel unless its name says otherwise. Kernels that work in
place read and write the caller's states by slot id. FLA's take no slot ids and write a new fp32 state at
every call: they get their rows' states copied once, and each call repeats the same first step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata, util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from deltalog_kernels.families import GDN, KDA, RWKV6, Family


@dataclass(frozen=True)
class Inputs:
    """One step of B rows: contiguous tensors on a CUDA device.

    name     shape            dtype  meaning
    q, k     [B, H, K]        bf16   query (RWKV6: receptance) and key, not normalised
    v        [B, HV, V]       bf16   value
    a        GDN [B, HV], KDA [B, HV, K], RWKV6 [B, H, K]
                              bf16   raw gate; RWKV6: decay_ln = -exp(a)
    b        [B, HV]          bf16   raw beta, before the sigmoid; not read for RWKV6
    a_log    [HV]             fp32   not read for RWKV6
    dt_bias  GDN [HV], KDA [HV, K]
                              fp32   not read for RWKV6
    bonus    [H, K]           fp32   read for RWKV6 only
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor
    bonus: Tensor


Step = Callable[[], Tensor]
"""Runs one decode step and returns out [B, HV, V]. Launches kernels only: a CUDA graph can capture it after
a call or two, which compile and tune. The next call may overwrite what it returned."""

Make = Callable[[Inputs, Tensor, Tensor], Step]
"""Takes inputs, states [slots, HV, V, K] in the state dtype, and distinct slot_ids [B] int32, all > 0."""


@dataclass(frozen=True)
class Baseline:
    """A kernel of another project: its name with the version installed, and the maker of its step."""

    name: str
    make: Make


def baselines(family: Family, state_dtype: torch.dtype) -> tuple[list[Baseline], list[str]]:
    """Those importable here for the family and dtype, and one line for each that is not, with the reason.

    Head sizes are checked by the kernels themselves, at the first call: vLLM's KDA takes as many value
    heads as key heads; FlashInfer wants K = V = 128 for a bf16 state and both at least 128 for fp32.
    """
    found, missing = [], []
    for candidate in _CANDIDATES:
        if candidate.family != family:
            continue
        label = f"{candidate.project} {candidate.what}"
        if state_dtype not in candidate.state_dtypes:
            missing.append(f"{label}: keeps no state in {state_dtype}")
            continue
        try:
            make = candidate.load()
            version = metadata.version(candidate.distribution)
        except ImportError as error:
            missing.append(f"{label}: {error}")
        else:
            found.append(Baseline(f"{candidate.project} {version} {candidate.what}", make))
    return found, missing


def _fla_gdn(*, state_v_first: bool) -> Make:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule  # type: ignore[import-not-found]

    return partial(_make_fla_delta_rule, fused_recurrent_gated_delta_rule, state_v_first)


def _fla_kda(*, state_v_first: bool) -> Make:
    from fla.ops.kda import fused_recurrent_kda  # type: ignore[import-not-found]

    return partial(_make_fla_delta_rule, fused_recurrent_kda, state_v_first)


def _make_fla_delta_rule(
    function: Callable[..., Any], state_v_first: bool, inputs: Inputs, states: Tensor, slot_ids: Tensor
) -> Step:
    state = states[slot_ids.long()]
    state = state if state_v_first else state.mT.contiguous()
    q, k, v, a, b = (x[:, None] for x in (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b))

    @torch.no_grad()
    def step() -> Tensor:
        out, _ = function(
            q,
            k,
            v,
            a,
            beta=b,
            A_log=inputs.a_log,
            dt_bias=inputs.dt_bias,
            scale=q.shape[-1] ** -0.5,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            state_v_first=state_v_first,
        )
        return out[:, 0]

    return step


def _fla_rwkv6() -> Make:
    from fla.ops.rwkv6 import fused_recurrent_rwkv6  # type: ignore[import-not-found]

    def make(inputs: Inputs, states: Tensor, slot_ids: Tensor) -> Step:
        state = states[slot_ids.long()].mT.contiguous()
        decay_ln = -inputs.a.float().exp()
        r, k, v, w = (x[:, None] for x in (inputs.q, inputs.k, inputs.v, decay_ln))

        @torch.no_grad()
        def step() -> Tensor:
            out, _ = fused_recurrent_rwkv6(
                r, k, v, w, inputs.bonus, scale=1.0, initial_state=state, output_final_state=True
            )
            return out[:, 0]

        return step

    return make


def _packed_qkv(inputs: Inputs) -> Tensor:
    """[B, 2 H K + HV V], as vLLM's convolution leaves it."""
    return torch.cat([x.flatten(1) for x in (inputs.q, inputs.k, inputs.v)], dim=1)


def _vllm_gdn() -> Make:
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent_gated_delta_rule_packed_decode

    def make(inputs: Inputs, states: Tensor, slot_ids: Tensor) -> Step:
        mixed_qkv, out = _packed_qkv(inputs), torch.empty_like(inputs.v)

        def step() -> Tensor:
            fused_recurrent_gated_delta_rule_packed_decode(
                mixed_qkv=mixed_qkv,
                a=inputs.a,
                b=inputs.b,
                A_log=inputs.a_log,
                dt_bias=inputs.dt_bias,
                scale=inputs.q.shape[-1] ** -0.5,
                initial_state=states,
                out=out[:, None],
                ssm_state_indices=slot_ids,
                use_qk_l2norm_in_kernel=True,
            )
            return out

        return step

    return make


def _vllm_kda() -> Make:
    kernels = _module_of_file("vllm", "models/kimi_k3/nvidia/ops/third_party/kda/fused_recurrent.py")

    def make(inputs: Inputs, states: Tensor, slot_ids: Tensor) -> Step:
        mixed_qkv, out = _packed_qkv(inputs), torch.empty_like(inputs.v)

        def step() -> Tensor:
            kernels.fused_recurrent_kda_packed_decode(
                mixed_qkv=mixed_qkv,
                raw_g=inputs.a[None],
                raw_beta=inputs.b[None],
                A_log=inputs.a_log,
                dt_bias=inputs.dt_bias,
                lower_bound=None,
                initial_state=states,
                state_indices=slot_ids,
                scale=inputs.q.shape[-1] ** -0.5,
                out=out[None],
            )
            return out

        return step

    return make


def _module_of_file(package: str, path: str) -> ModuleType:
    """A module of an installed package without its parents, which here would import whole models."""
    found = util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    file = Path(found.submodule_search_locations[0], path)
    spec = util.spec_from_file_location(f"{package}_{file.stem}", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ImportError(f"this {package} has no {path}")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _flashinfer_gdn() -> Make:
    # The public module hides a failed import of its kernels until the first call.
    for kernel in ("gdn_decode_pretranspose", "gdn_decode_bf16_state"):
        import_module(f"flashinfer.gdn_kernels.{kernel}")
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose  # type: ignore[import-not-found]

    def make(inputs: Inputs, states: Tensor, slot_ids: Tensor) -> Step:
        q, k, v, a, b = (x[:, None] for x in (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b))
        out = torch.empty_like(v)

        def step() -> Tensor:
            gated_delta_rule_decode_pretranspose(
                q=q,
                k=k,
                v=v,
                state=None,
                A_log=inputs.a_log,
                a=a,
                dt_bias=inputs.dt_bias,
                b=b,
                scale=q.shape[-1] ** -0.5,
                output=out,
                use_qk_l2norm=True,
                initial_state=states,
                initial_state_indices=slot_ids,
                backend="flashinfer",  # "auto" launches index checks first, for kernels of another GPU
            )
            return out[:, 0]

        return step

    return make


@dataclass(frozen=True)
class _Candidate:
    family: Family
    project: str
    distribution: str
    what: str
    state_dtypes: tuple[torch.dtype, ...]
    load: Callable[[], Make]


_FP32, _FP32_OR_BF16 = (torch.float32,), (torch.float32, torch.bfloat16)
_FLA, _VLLM = ("FLA", "fla-core"), ("vLLM", "vllm")
_CANDIDATES = (
    _Candidate(GDN, *_FLA, "[K,V]", _FP32, partial(_fla_gdn, state_v_first=False)),
    _Candidate(GDN, *_FLA, "[V,K]", _FP32, partial(_fla_gdn, state_v_first=True)),
    _Candidate(GDN, *_VLLM, "packed decode", _FP32_OR_BF16, _vllm_gdn),
    _Candidate(GDN, "FlashInfer", "flashinfer-python", "pretranspose", _FP32_OR_BF16, _flashinfer_gdn),
    _Candidate(KDA, *_FLA, "[K,V]", _FP32, partial(_fla_kda, state_v_first=False)),
    _Candidate(KDA, *_FLA, "[V,K]", _FP32, partial(_fla_kda, state_v_first=True)),
    _Candidate(KDA, *_VLLM, "packed decode", _FP32_OR_BF16, _vllm_kda),
    _Candidate(RWKV6, *_FLA, "[K,V] (gates outside)", _FP32, _fla_rwkv6),
)

"""The public steps: validate once, pick the backend, run.

A step emits one token a row through base and log, and appends one log entry or merges the log into
the base. Which of the two follows from the row's position (layout.live_length), so rows in different
phases share a call and the caller keeps no counter.
"""

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import softplus

from deltalog_kernels import cpu
from deltalog_kernels.families import GDN, KDA, RWKV6, Family
from deltalog_kernels.layout import SlotMemory


def gdn_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gates of a gated delta net from its projections, in fp32 whatever the model's dtype.

    a, b [B, HV], a_log and dt_bias [HV]. Returns decay_ln = -exp(a_log) softplus(a + dt_bias) <= 0 and
    beta = sigmoid(b), both fp32 [B, HV].
    """
    return -a_log.float().exp() * softplus(a.float() + dt_bias.float()), b.float().sigmoid()


def kda_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None = None
) -> tuple[Tensor, Tensor]:
    """Gates of a Kimi-delta-attention layer from its projections, in fp32 whatever the model's dtype.

    a [B, HV, K], b and a_log [.., HV], dt_bias [HV, K]. Returns decay_ln fp32 [B, HV, K], <= 0, and
    beta = sigmoid(b) fp32 [B, HV]. Without a lower bound decay_ln = -exp(a_log) softplus(a + dt_bias);
    with one (the safe gate, for example -5) lower_bound sigmoid(exp(a_log) (a + dt_bias)).
    """
    check_lower_bound(lower_bound)
    rate, x = a_log.float().exp()[..., None], a.float() + dt_bias.float()
    decay_ln = -rate * softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()
    return decay_ln, b.float().sigmoid()


@torch.no_grad()
def gdn_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay_ln: Tensor,
    beta: Tensor,
    *,
    memory: SlotMemory,
    slot_ids: Tensor,
    positions: Tensor,
    phase_offset: int = 0,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Emit one token a row of a gated delta net; append to the row's log, or merge it when it is full.

    name       shape        dtype            dir     meaning
    q, k       [B, H, K]    key_dtype        in      query and key, L2-normalised here
    v          [B, HV, V]   floating point   in      value
    decay_ln   [B, HV]      floating point   in      natural log of the decay, <= 0
    beta       [B, HV]      floating point   in      write strength
    memory     SlotMemory   its layout       in/out  base state and log of one layer
    slot_ids   [B]          integer          in      slot of each row; <= NULL_SLOT: output 0, nothing touched
    positions  [B]          integer          in      0-based position of the token; ignored where padding
    phase_offset                             in      shifts where the log merges (see layout.live_length)
    scale                                    in      on the query; None is K^-1/2
    out        [B, HV, V]   floating point   out     returned; allocated in v's dtype when None

    Slots of one call must differ. Raises ValueError on a shape, dtype or family that does not fit, and
    NotImplementedError on a device without a backend.
    """
    layout, rows = memory.layout, count_rows(slot_ids)
    gates = {"decay_ln": (decay_ln, (rows, layout.value_heads)), "beta": (beta, (rows, layout.value_heads))}
    out = check_step(GDN, q, k, v, gates, memory, slot_ids, positions, out)
    scale = layout.key_dim**-0.5 if scale is None else scale
    gate = decay_ln[..., None]
    step = backend(memory).delta_rule_step
    step(q, k, v, gate, beta, memory, slot_ids, positions, phase_offset, scale, out)
    return out


@torch.no_grad()
def kda_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay_ln: Tensor,
    beta: Tensor,
    *,
    memory: SlotMemory,
    slot_ids: Tensor,
    positions: Tensor,
    phase_offset: int = 0,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Emit one token a row of a Kimi-delta-attention layer. As gdn_step, but a gate for each channel:

    name       shape        dtype            dir     meaning
    decay_ln   [B, HV, K]   floating point   in      natural log of each key channel's decay, <= 0
    """
    layout, rows = memory.layout, count_rows(slot_ids)
    gates = {
        "decay_ln": (decay_ln, (rows, layout.value_heads, layout.key_dim)),
        "beta": (beta, (rows, layout.value_heads)),
    }
    out = check_step(KDA, q, k, v, gates, memory, slot_ids, positions, out)
    scale = layout.key_dim**-0.5 if scale is None else scale
    step = backend(memory).delta_rule_step
    step(q, k, v, decay_ln, beta, memory, slot_ids, positions, phase_offset, scale, out)
    return out


@torch.no_grad()
def rwkv6_step(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    decay_ln: Tensor,
    bonus: Tensor,
    *,
    memory: SlotMemory,
    slot_ids: Tensor,
    positions: Tensor,
    phase_offset: int = 0,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Emit one token a row of an RWKV6 layer. As gdn_step, with as many key heads as value heads and:

    name       shape        dtype            dir     meaning
    r, k       [B, H, K]    key_dtype        in      receptance (the query) and key, taken as they come
    v          [B, H, V]    floating point   in      value; the log keeps it in update_dtype
    decay_ln   [B, H, K]    floating point   in      natural log of each key channel's decay, <= 0
    bonus      [H, K]       floating point   in      weight of the current token (RWKV6's u), contiguous
    scale                                    in      on the receptance; None is 1
    """
    layout, rows = memory.layout, count_rows(slot_ids)
    gates = {
        "decay_ln": (decay_ln, (rows, layout.value_heads, layout.key_dim)),
    }
    check_parameters(memory, bonus=(bonus, (layout.key_heads, layout.key_dim)))
    out = check_step(RWKV6, r, k, v, gates, memory, slot_ids, positions, out)
    scale = 1.0 if scale is None else scale
    step = backend(memory).rwkv6_step
    step(r, k, v, decay_ln, bonus, memory, slot_ids, positions, phase_offset, scale, out)
    return out


def merge(memory: SlotMemory, slot_ids: Tensor, positions: Tensor, *, phase_offset: int = 0) -> None:
    """Forced merge: fold what is live at ``positions`` into the base and leave it neutral in the log.

    slot_ids and positions are [B]; the position is that of the slot's next token, so the log goes on
    where it was. Padding slots (<= NULL_SLOT) are skipped. Afterwards the base is the current state.
    """
    fold_and_fill(memory, slot_ids, positions, positions, phase_offset=phase_offset)


@torch.no_grad()
def fold_and_fill(
    memory: SlotMemory, slot_ids: Tensor, starts: Tensor, ends: Tensor, *, phase_offset: int = 0
) -> None:
    """Make the bases dense before a prefill of positions [start, end), and the logs fit to follow it.

    What is live at ``start`` is folded into the base (nothing at 0: a fresh slot holds whatever was
    there before). Then the entries that will count as live at ``end`` are made neutral, because the
    prefill leaves all its tokens in the base. There is no fold without the fill.

    slot_ids, starts, ends [B], integer; padding slots (<= NULL_SLOT) are skipped.
    """
    rows = count_rows(slot_ids)
    for name, tensor in (("slot_ids", slot_ids), ("starts", starts), ("ends", ends)):
        check_shape(name, tensor, (rows,))
    _check_integers(slot_ids=slot_ids, starts=starts, ends=ends)
    _check_device(memory, slot_ids, starts, ends)
    backend(memory).fold_and_fill(memory, slot_ids, starts, ends, phase_offset)


def check_lower_bound(lower_bound: float | None) -> None:
    """Raises ValueError for a bound that no log-decay can have."""
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound must be below 0, as a log-decay is, got {lower_bound}; negate it")


def check_parameters(memory: SlotMemory, **parameters: tuple[Tensor, tuple[int, ...]]) -> None:
    """Check a layer's own tensors, which have no rows, with their shapes."""
    for name, (tensor, shape) in parameters.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} must have shape {list(shape)}, got {list(tensor.shape)}; "
                "the sizes come from the LogLayout, so build it for this layer"
            )
        if not tensor.is_floating_point():
            raise ValueError(
                f"{name} must be floating point, got {tensor.dtype}; pass the layer's own parameter"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, got strides {tensor.stride()}; "
                "call .contiguous() once, when the model is loaded"
            )
    _check_device(memory, *(tensor for tensor, _ in parameters.values()))


def count_rows(slot_ids: Tensor) -> int:
    """B, or -1 where slot_ids has no shape [B]."""
    return slot_ids.shape[0] if slot_ids.dim() == 1 else -1


def check_step(
    family: Family,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, tuple[Tensor, tuple[int, ...]]],
    memory: SlotMemory,
    slot_ids: Tensor,
    positions: Tensor,
    out: Tensor | None,
) -> Tensor:
    """Check a step's arguments; ``gates`` are those that the families do not share, with their shapes."""
    layout, rows = memory.layout, count_rows(slot_ids)
    if layout.family != family:
        raise ValueError(
            f"expected a pool of family {family.name}, got one of {layout.family.name}; "
            f"call {layout.family.name}_step, or build the LogLayout for {family.name}"
        )
    out = torch.empty_like(v) if out is None else out
    qk_shape, v_shape = (rows, layout.key_heads, layout.key_dim), (rows, layout.value_heads, layout.value_dim)
    check_shape("slot_ids", slot_ids, (rows,))
    check_shape("positions", positions, (rows,))
    for name, tensor, shape in (
        ("q" if family.delta_rule else "r", q, qk_shape),
        ("k", k, qk_shape),
        ("v", v, v_shape),
        *((name, tensor, shape) for name, (tensor, shape) in gates.items()),
        ("out", out, v_shape),
    ):
        check_shape(name, tensor, shape)
        if not tensor.is_floating_point():
            raise ValueError(
                f"{name} must be floating point, got {tensor.dtype}; cast it to the model's dtype"
            )
    if k.dtype != layout.key_dtype:
        raise ValueError(
            f"k must be {layout.key_dtype}, the dtype of the log's keys, got {k.dtype}; "
            "the log keeps keys exactly as they come, so build the LogLayout with the model's dtype"
        )
    _check_integers(slot_ids=slot_ids, positions=positions)
    _check_device(memory, q, k, v, *(tensor for tensor, _ in gates.values()), slot_ids, positions, out)
    return out


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        expected = "[B]" if shape == (-1,) else str(list(shape))
        raise ValueError(
            f"{name} must have shape {expected}, got {list(tensor.shape)}; "
            "B is the length of slot_ids, the other sizes come from the LogLayout"
        )


def _check_integers(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64, got {tensor.dtype}; cast it once a step")


def _check_device(memory: SlotMemory, *tensors: Tensor) -> None:
    devices = {str(tensor.device) for tensor in (memory.base, *tensors)}
    if len(devices) > 1:
        raise ValueError(
            f"expected all tensors on the device of the pool, {memory.base.device}; got some on "
            f"{', '.join(sorted(devices - {str(memory.base.device)}))}; move them there"
        )


def backend(memory: SlotMemory) -> ModuleType:
    """The module that runs the steps on the pool's device."""
    if memory.base.device.type == "cpu":
        return cpu
    if memory.base.device.type != "cuda":
        raise NotImplementedError(
            f"expected tensors on a CUDA GPU or the CPU, got {memory.base.device}; move all of them to one"
        )
    # Triton is not there without a GPU.
    from deltalog_kernels.kernels import launch

    return launch

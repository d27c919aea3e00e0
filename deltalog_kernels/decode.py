"""The public steps: validate once, pick the backend, run.

A step emits one token a row through base and log, and appends one log entry or merges the log into
the base. Which of the two follows from the row's position (layout.live_length), so rows in different
phases share a call and the caller keeps no counter.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from deltalog_kernels import cpu
from deltalog_kernels.layout import NULL_SLOT, SlotMemory, live_length


def gdn_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gates of a gated delta net from its projections, in fp32 whatever the model's dtype.

    a, b [B, HV], a_log and dt_bias [HV]. Returns decay_ln = -exp(a_log) softplus(a + dt_bias) <= 0 and
    beta = sigmoid(b), both fp32 [B, HV].
    """
    return -a_log.float().exp() * softplus(a.float() + dt_bias.float()), b.float().sigmoid()


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

    Slots of one call must differ. Raises ValueError on a shape or dtype that does not fit, and
    NotImplementedError on a device without a backend.
    """
    layout = memory.layout
    rows = slot_ids.shape[0] if slot_ids.dim() == 1 else -1
    if out is None:
        out = torch.empty_like(v)
    qk_shape, v_shape = (rows, layout.key_heads, layout.key_dim), (rows, layout.value_heads, layout.value_dim)
    _check_shape("slot_ids", slot_ids, (rows,))
    _check_shape("positions", positions, (rows,))
    for name, tensor, shape in (
        ("q", q, qk_shape),
        ("k", k, qk_shape),
        ("v", v, v_shape),
        ("decay_ln", decay_ln, (rows, layout.value_heads)),
        ("beta", beta, (rows, layout.value_heads)),
        ("out", out, v_shape),
    ):
        _check_shape(name, tensor, shape)
    if k.dtype != layout.key_dtype:
        raise ValueError(
            f"k must be {layout.key_dtype}, the dtype of the log's keys, got {k.dtype}; "
            "the log keeps keys exactly as they come, so build the LogLayout with the model's dtype"
        )
    _check_integers(slot_ids=slot_ids, positions=positions)
    _check_device(memory, q, k, v, decay_ln, beta, slot_ids, positions, out)
    scale = layout.key_dim**-0.5 if scale is None else scale
    cpu.gdn_step(q, k, v, decay_ln, beta, memory, slot_ids, positions, phase_offset, scale, out)
    return out


def merge(memory: SlotMemory, slot_ids: Tensor, positions: Tensor, *, phase_offset: int = 0) -> None:
    """Forced merge: fold what is live at ``positions`` into the base and leave it neutral in the log.

    slot_ids and positions are [B]; the position is that of the slot's next token, so the log goes on
    where it was. Padding slots (<= NULL_SLOT) are skipped. Afterwards the base is the current state.
    """
    fold_and_fill(memory, slot_ids, positions, positions, phase_offset=phase_offset)


def fold_and_fill(
    memory: SlotMemory, slot_ids: Tensor, starts: Tensor, ends: Tensor, *, phase_offset: int = 0
) -> None:
    """Make the bases dense before a prefill of positions [start, end), and the logs fit to follow it.

    What is live at ``start`` is folded into the base (nothing at 0: a fresh slot holds whatever was
    there before). Then the entries that will count as live at ``end`` are made neutral, because the
    prefill leaves all its tokens in the base. There is no fold without the fill.

    slot_ids, starts, ends [B], integer; padding slots (<= NULL_SLOT) are skipped.
    """
    rows = slot_ids.shape[0] if slot_ids.dim() == 1 else -1
    for name, tensor in (("slot_ids", slot_ids), ("starts", starts), ("ends", ends)):
        _check_shape(name, tensor, (rows,))
    _check_integers(slot_ids=slot_ids, starts=starts, ends=ends)
    _check_device(memory, slot_ids, starts, ends)
    real = slot_ids > NULL_SLOT
    slots, starts, ends = slot_ids[real].long(), starts[real].long(), ends[real].long()
    interval = memory.layout.merge_interval
    live = live_length(starts, interval, phase_offset)
    live = torch.where(starts > 0, live, torch.zeros_like(live))
    if (live > 0).any():
        cpu.fold(memory, slots[live > 0], live[live > 0])
    cpu.fill(memory, slots, live_length(ends, interval, phase_offset))


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
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
    devices = {tensor.device.type for tensor in (memory.base, *tensors)}
    if devices != {"cpu"}:
        raise NotImplementedError(
            f"this version decodes on the CPU, got tensors on {', '.join(sorted(devices))}; "
            "move all of them to the cpu"
        )

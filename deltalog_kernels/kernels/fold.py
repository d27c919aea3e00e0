"""What a prefill needs before it: the log folded into the base, and neutral entries where it will resume."""

import triton
import triton.language as tl

from deltalog_kernels.kernels.replay import add_entry, channel_offsets, live_entries, tile_offsets


@triton.jit
def fold_kernel(
    base_ptr,
    log_keys_ptr,
    log_updates_ptr,
    log_decays_ptr,
    slot_ids_ptr,
    starts_ptr,
    base_stride,
    log_keys_stride,
    log_updates_stride,
    log_decays_stride,
    phase_offset,
    HEADS_RATIO: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    GATES: tl.constexpr,
    NULL_SLOT: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """base <- base e^G + sum_i e^{d_i} k_i u_i^T over what is live at a row's start; nothing at 0."""
    SPLITS: tl.constexpr = V // ROWS
    program = tl.program_id(0)
    row, hv = (program // (SPLITS * HV)).to(tl.int64), (program // SPLITS) % HV
    rows = (program % SPLITS) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slot_ids_ptr + row).to(tl.int64)
    start = tl.load(starts_ptr + row)
    live = live_entries(start, phase_offset, M)
    if (slot <= NULL_SLOT) | (start <= 0) | (live == 0):
        return
    CHUNKS: tl.constexpr = K // CHUNK
    channel = channel_offsets(K, CHUNK)
    gate_channel = channel if GATES > 1 else tl.zeros([1, 1], tl.int32)
    log_keys_ptr += slot * log_keys_stride + (hv // HEADS_RATIO) * ((M - 1) * K)
    log_updates_ptr += slot * log_updates_stride + hv * ((M - 1) * V)
    log_decays_ptr += slot * log_decays_stride + hv * ((M - 1) * GATES)
    logged = tl.zeros([CHUNKS, ROWS, CHUNK], tl.float32)
    age = tl.zeros_like(gate_channel).to(tl.float32)
    for back in range(live):
        logged, age = add_entry(
            logged,
            age,
            log_keys_ptr,
            log_updates_ptr,
            log_decays_ptr,
            live - 1 - back,
            channel,
            gate_channel,
            rows,
            K,
            V,
            GATES,
        )
    base_ptr += slot * base_stride + hv * (V * K) + (program % SPLITS) * (ROWS * K)
    base_ptr += tile_offsets(K, CHUNK, ROWS)
    tile = tl.reshape(tl.load(base_ptr), (CHUNKS, ROWS, CHUNK)).to(tl.float32)
    merged = tl.reshape(tile * tl.exp(age)[:, None, :] + logged, (CHUNKS * ROWS, CHUNK))
    tl.store(base_ptr, merged.to(base_ptr.dtype.element_ty))


@triton.jit
def fill_kernel(
    log_keys_ptr,
    log_updates_ptr,
    log_decays_ptr,
    slot_ids_ptr,
    ends_ptr,
    log_keys_stride,
    log_updates_stride,
    log_decays_stride,
    phase_offset,
    HEADS_RATIO: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    GATES: tl.constexpr,
    NULL_SLOT: tl.constexpr,
    NEUTRAL: tl.constexpr,
):
    """Neutral entries below the live length of a row's end."""
    program = tl.program_id(0)
    row, hv = (program // HV).to(tl.int64), program % HV
    slot = tl.load(slot_ids_ptr + row).to(tl.int64)
    if slot <= NULL_SLOT:
        return
    count = live_entries(tl.load(ends_ptr + row), phase_offset, M)
    log_keys_ptr += slot * log_keys_stride + (hv // HEADS_RATIO) * ((M - 1) * K)
    log_updates_ptr += slot * log_updates_stride + hv * ((M - 1) * V)
    log_decays_ptr += slot * log_decays_stride + hv * ((M - 1) * GATES)
    for entry in range(count):
        key = tl.full([K], NEUTRAL, log_keys_ptr.dtype.element_ty)
        update = tl.full([V], NEUTRAL, log_updates_ptr.dtype.element_ty)
        decay_ln = tl.full([GATES], NEUTRAL, log_decays_ptr.dtype.element_ty)
        tl.store(log_updates_ptr + entry * V + tl.arange(0, V), update)
        tl.store(log_decays_ptr + entry * GATES + tl.arange(0, GATES), decay_ln)
        if hv % HEADS_RATIO == 0:
            tl.store(log_keys_ptr + entry * K + tl.arange(0, K), key)

"""The paper's two launches of a GDN or KDA step, to be timed beside our one.

ReplayPrep works out once a row and value head what all its value tiles need, and leaves it in a scratch
buffer; AppendDecode reads that for every tile, answers, and appends or merges. Rows may be in any phase.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltalog_kernels import LogLayout, SlotMemory, tuning
from deltalog_kernels.bench.baselines import Inputs
from deltalog_kernels.kernels.delta_rule import append_decode, softplus
from deltalog_kernels.kernels.replay import (
    add_full_log,
    channel_offsets,
    clamped,
    entry_sums,
    live_entries,
    replay_prep,
    tile_offsets,
)
from deltalog_kernels.layout import DECAY_LN_MIN, NULL_SLOT
from deltalog_kernels.reference import L2_EPS

ROWS, TILES = 8, 4
"""Value rows of a tile, and tiles of an AppendDecode program where a head has as many."""


def two_launch_step(
    layout: LogLayout, token: Inputs, memory: SlotMemory, slot_ids: Tensor, out: Tensor
) -> Callable[[Tensor], Tensor]:
    """As steps.deltalog_step: the step on these inputs, as a function of the positions.

    Everything is contiguous, as the bench makes it.
    """
    batch = len(slot_ids)
    scratch = _scratch(layout, batch, memory.base.device)
    entries = _entries(layout)
    sizes: dict[str, Any] = {
        "HEADS_RATIO": layout.heads_ratio,
        "HV": layout.value_heads,
        "K": layout.key_dim,
        "M": layout.merge_interval,
        "GATES": layout.decay_dim,
        "NULL_SLOT": NULL_SLOT,
        "CHUNK": tuning.chunk(layout),
        "ENTRIES": entries,
        "SIZE": scratch.shape[-1],
        "num_warps": 1,
    }
    tiles = min(TILES, layout.value_dim // ROWS)
    programs = batch * layout.value_heads * (layout.value_dim // (ROWS * tiles))
    gates = (token.a, token.b, token.a_log, token.dt_bias)
    scale = layout.key_dim**-0.5

    def step(positions: Tensor) -> Tensor:
        replay_prep_kernel[(batch * layout.value_heads,)](
            *(token.q, token.k, *gates, scratch, memory.log_keys, memory.log_decays, slot_ids, positions),
            scale,
            EPS=L2_EPS,
            DECAY_LN_MIN=DECAY_LN_MIN,
            **sizes,
        )
        append_decode_kernel[(programs,)](
            *(token.k, token.v, scratch, memory.base, memory.log_keys, memory.log_updates, memory.log_decays),
            *(out, slot_ids, positions),
            V=layout.value_dim,
            ROWS=ROWS,
            TILES=tiles,
            **sizes,
        )
        return out

    return step


def _entries(layout: LogLayout) -> int:
    """Entries of a log, up to the next power of two."""
    return triton.next_power_of_2(max(1, layout.capacity))


@lru_cache(maxsize=1)
def _scratch(layout: LogLayout, batch: int, device: torch.device) -> Tensor:
    """fp32 [B, HV, SIZE], one for all steps of a size, as an engine would have it. A head's numbers are:
    decayed key and query [K], decay of the base and own log-decay [GATES], coefficients of key and query
    [ENTRIES], key times query, beta, inverse norm of the key, and nothing up to a whole line of 128 bytes."""
    used = 2 * layout.key_dim + 2 * layout.decay_dim + 2 * _entries(layout) + 3
    return torch.empty(batch, layout.value_heads, -(-used // 32) * 32, device=device)


@triton.jit
def replay_prep_kernel(
    q_ptr,
    k_ptr,
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    scratch_ptr,
    log_keys_ptr,
    log_decays_ptr,
    slot_ids_ptr,
    positions_ptr,
    scale,
    EPS: tl.constexpr,
    DECAY_LN_MIN: tl.constexpr,
    HEADS_RATIO: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    GATES: tl.constexpr,
    NULL_SLOT: tl.constexpr,
    CHUNK: tl.constexpr,
    ENTRIES: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One row and value head: gates and coefficients into the scratch, key and log-decay into the log."""
    head = tl.program_id(0).to(tl.int64)
    row, hv = head // HV, head % HV
    key_head = row * (HV // HEADS_RATIO) + hv // HEADS_RATIO
    slot = tl.load(slot_ids_ptr + row).to(tl.int64)
    if slot <= NULL_SLOT:
        return
    channel = channel_offsets(K, CHUNK)
    gate_channel = channel if GATES > 1 else tl.zeros([1, 1], tl.int32)
    live = live_entries(tl.load(positions_ptr + row), 0, M)
    log_keys_ptr += (slot * (HV // HEADS_RATIO) + hv // HEADS_RATIO) * ((M - 1) * K)
    log_decays_ptr += (slot * HV + hv) * ((M - 1) * GATES)

    raw_key = tl.load(k_ptr + key_head * K + channel).to(tl.float32)
    query = tl.load(q_ptr + key_head * K + channel).to(tl.float32)
    inverse_norm = tl.rsqrt(tl.sum(raw_key * raw_key) + EPS)
    key = raw_key * inverse_norm
    query = query * (tl.rsqrt(tl.sum(query * query) + EPS) * scale)
    gate = tl.load(a_ptr + head * GATES + gate_channel).to(tl.float32)
    gate += tl.load(dt_bias_ptr + hv * GATES + gate_channel).to(tl.float32)
    decay_ln = -tl.exp(tl.load(a_log_ptr + hv).to(tl.float32)) * softplus(gate)
    decay_ln = clamped(decay_ln, DECAY_LN_MIN)
    beta = tl.sigmoid(tl.load(b_ptr + head).to(tl.float32))

    decayed_keys, total = replay_prep(
        log_keys_ptr, log_decays_ptr, decay_ln, live, channel, gate_channel, K, GATES, ENTRIES
    )
    scratch_ptr += head * SIZE
    tl.store(scratch_ptr + channel, key * total)
    tl.store(scratch_ptr + K + channel, query * total)
    tl.store(scratch_ptr + 2 * K + gate_channel, total)
    tl.store(scratch_ptr + 2 * K + GATES + gate_channel, decay_ln)
    scratch_ptr += 2 * K + 2 * GATES
    entry = tl.arange(0, ENTRIES)
    tl.store(scratch_ptr + entry, entry_sums(decayed_keys * key))
    tl.store(scratch_ptr + ENTRIES + entry, entry_sums(decayed_keys * query))
    scratch_ptr += 2 * ENTRIES
    tl.store(scratch_ptr, tl.sum(key * query))
    tl.store(scratch_ptr + 1, beta)
    tl.store(scratch_ptr + 2, inverse_norm)
    if live < M - 1:
        tl.store(log_decays_ptr + live * GATES + gate_channel, decay_ln)
        # One of the value heads that share the key writes it.
        if hv % HEADS_RATIO == 0:
            tl.store(log_keys_ptr + live * K + channel, raw_key.to(log_keys_ptr.dtype.element_ty))


@triton.jit
def append_decode_kernel(
    k_ptr,
    v_ptr,
    scratch_ptr,
    base_ptr,
    log_keys_ptr,
    log_updates_ptr,
    log_decays_ptr,
    out_ptr,
    slot_ids_ptr,
    positions_ptr,
    HEADS_RATIO: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    GATES: tl.constexpr,
    NULL_SLOT: tl.constexpr,
    CHUNK: tl.constexpr,
    ENTRIES: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Some value tiles of one row and value head: outputs, and updates into the log or a merged base."""
    SPLITS: tl.constexpr = V // (ROWS * TILES)
    CHUNKS: tl.constexpr = K // CHUNK
    program = tl.program_id(0)
    split, head = program % SPLITS, (program // SPLITS).to(tl.int64)
    row, hv = head // HV, head % HV
    key_head = row * (HV // HEADS_RATIO) + hv // HEADS_RATIO
    rows = split * (ROWS * TILES) + tl.arange(0, ROWS)
    slot = tl.load(slot_ids_ptr + row).to(tl.int64)
    out_ptr += head * V
    if slot <= NULL_SLOT:
        for tile_index in range(TILES):
            tl.store(out_ptr + tile_index * ROWS + rows, tl.zeros([ROWS], out_ptr.dtype.element_ty))
        return
    channel = channel_offsets(K, CHUNK)
    gate_channel = channel if GATES > 1 else tl.zeros([1, 1], tl.int32)
    live = live_entries(tl.load(positions_ptr + row), 0, M)
    slot_head = slot * HV + hv
    log_keys_ptr += (slot * (HV // HEADS_RATIO) + hv // HEADS_RATIO) * ((M - 1) * K)
    log_updates_ptr += slot_head * ((M - 1) * V)
    log_decays_ptr += slot_head * ((M - 1) * GATES)
    base_ptr += slot_head * (V * K) + split * (TILES * ROWS * K)
    offsets = tile_offsets(K, CHUNK, ROWS)

    scratch_ptr += head * SIZE
    base_key = tl.load(scratch_ptr + channel)[:, None, :]
    base_query = tl.load(scratch_ptr + K + channel)[:, None, :]
    total = tl.load(scratch_ptr + 2 * K + gate_channel)
    decay_ln = tl.load(scratch_ptr + 2 * K + GATES + gate_channel)
    scratch_ptr += 2 * K + 2 * GATES
    entry = tl.arange(0, ENTRIES)[:, None]
    key_coefficients = tl.load(scratch_ptr + entry)
    query_coefficients = tl.load(scratch_ptr + ENTRIES + entry)
    scratch_ptr += 2 * ENTRIES
    key_query = tl.load(scratch_ptr)
    beta = tl.load(scratch_ptr + 1)
    inverse_norm = tl.load(scratch_ptr + 2)

    for tile_index in range(TILES):
        here = rows + tile_index * ROWS
        place = base_ptr + tile_index * (ROWS * K) + offsets
        tile = tl.reshape(tl.load(place), (CHUNKS, ROWS, CHUNK)).to(tl.float32)
        update = append_decode(
            tile,
            here,
            base_key,
            base_query,
            key_coefficients,
            query_coefficients,
            key_query,
            beta,
            log_updates_ptr,
            live,
            v_ptr + head * V,
            out_ptr,
            V,
            ENTRIES,
        )
        update = update * inverse_norm
        if live == M - 1:
            raw_key = tl.load(k_ptr + key_head * K + channel).to(tl.float32)
            merged = tile * total[:, None, :] + raw_key[:, None, :] * update[None, :, None]
            merged = add_full_log(
                merged,
                decay_ln,
                log_keys_ptr,
                log_updates_ptr,
                log_decays_ptr,
                channel,
                gate_channel,
                here,
                K,
                V,
                M,
                GATES,
            )
            tl.store(place, tl.reshape(merged, (CHUNKS * ROWS, CHUNK)).to(base_ptr.dtype.element_ty))
        else:
            tl.store(log_updates_ptr + live * V + here, update.to(log_updates_ptr.dtype.element_ty))

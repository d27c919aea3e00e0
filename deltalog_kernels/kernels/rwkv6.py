"""One decode step of RWKV6: as the delta rule's, but the update is the value itself.

The output reads the state before the token's decay, so the entries are aged without it and the merge
ages them once more.
"""

import triton
import triton.language as tl

from deltalog_kernels.kernels.replay import (
    add_full_log,
    channel_offsets,
    clamped,
    entry_sums,
    live_entries,
    merges_now,
    replay_prep,
    row_sums,
    tile_offsets,
)


@triton.jit
def append_decode(
    tile,
    rows,
    base_receptance,
    coefficients,
    key_receptance,
    log_updates,
    live,
    value_ptr,
    out,
    V: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """The paper's AppendDecode: a tile's output, stored, and the token's values of its rows [R].

    tile [C, R, J] is the base, base_receptance [C, 1, J] carries its decay; coefficients [ENTRIES, 1] are
    the log's, key_receptance the bonus's. log_updates, value_ptr and out point to one head.
    """
    entry = tl.arange(0, ENTRIES)[:, None]
    updates = tl.load(log_updates + entry * V + rows[None, :], mask=entry < live, other=0.0).to(tl.float32)
    value = tl.load(value_ptr + rows).to(tl.float32)
    seen = row_sums(tile * base_receptance) + tl.sum(coefficients * updates, 0)
    tl.store(out + rows, (seen + key_receptance * value).to(out.dtype.element_ty))
    return value


@triton.jit
def rwkv6_kernel(
    r_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    bonus_ptr,
    out_ptr,
    base_ptr,
    log_keys_ptr,
    log_updates_ptr,
    log_decays_ptr,
    slot_ids_ptr,
    positions_ptr,
    r_stride,
    k_stride,
    v_stride,
    decay_stride,
    out_stride,
    base_stride,
    log_keys_stride,
    log_updates_stride,
    log_decays_stride,
    phase_offset,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    RAW_DECAY: tl.constexpr,
    PHASE: tl.constexpr,
    NULL_SLOT: tl.constexpr,
    DECAY_LN_MIN: tl.constexpr,
    CHUNK: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    SPLITS: tl.constexpr = V // (ROWS * TILES)
    program = tl.program_id(0)
    split = program % SPLITS
    h = (program // SPLITS) % H
    row = (program // (SPLITS * H)).to(tl.int64)
    rows = split * (ROWS * TILES) + tl.arange(0, ROWS)
    slot = tl.load(slot_ids_ptr + row).to(tl.int64)
    out_ptr += row * out_stride + h * V
    if slot <= NULL_SLOT:
        for tile_index in range(TILES):
            tl.store(out_ptr + tile_index * ROWS + rows, tl.zeros([ROWS], out_ptr.dtype.element_ty))
        return
    base_ptr += slot * base_stride + h * (V * K)
    channel = channel_offsets(K, CHUNK)
    TILE: tl.constexpr = ROWS * K
    CHUNKS: tl.constexpr = K // CHUNK
    base_ptr += split * (TILES * TILE)
    offsets = tile_offsets(K, CHUNK, ROWS)
    live = live_entries(tl.load(positions_ptr + row), phase_offset, M)
    log_keys_ptr += slot * log_keys_stride + h * ((M - 1) * K)
    log_updates_ptr += slot * log_updates_stride + h * ((M - 1) * V)
    log_decays_ptr += slot * log_decays_stride + h * ((M - 1) * K)
    v_ptr += row * v_stride + h * V

    key = tl.load(k_ptr + row * k_stride + h * K + channel).to(tl.float32)
    receptance = tl.load(r_ptr + row * r_stride + h * K + channel).to(tl.float32) * scale
    bonus = tl.load(bonus_ptr + h * K + channel).to(tl.float32)
    decay_ln = tl.load(decay_ptr + row * decay_stride + h * K + channel).to(tl.float32)
    if RAW_DECAY:
        decay_ln = -tl.exp(decay_ln)
    decay_ln = clamped(decay_ln, DECAY_LN_MIN)

    no_decay = tl.zeros_like(decay_ln)
    decayed_keys, total = replay_prep(
        log_keys_ptr, log_decays_ptr, no_decay, live, channel, channel, K, K, ENTRIES
    )
    coefficients = entry_sums(decayed_keys * receptance)[:, None]
    key_receptance = tl.sum(receptance * bonus * key)
    base_receptance = (receptance * total)[:, None, :]

    if merges_now(live, M, PHASE):
        for tile_index in range(TILES):
            here = rows + tile_index * ROWS
            tile = tl.reshape(tl.load(base_ptr + tile_index * TILE + offsets), (CHUNKS, ROWS, CHUNK)).to(
                tl.float32
            )
            value = append_decode(
                tile,
                here,
                base_receptance,
                coefficients,
                key_receptance,
                log_updates_ptr,
                live,
                v_ptr,
                out_ptr,
                V,
                ENTRIES,
            )
            tile = tile * (total * tl.exp(decay_ln))[:, None, :] + key[:, None, :] * value[None, :, None]
            tile = add_full_log(
                tile,
                decay_ln,
                log_keys_ptr,
                log_updates_ptr,
                log_decays_ptr,
                channel,
                channel,
                here,
                K,
                V,
                M,
                K,
            )
            merged = tl.reshape(tile, (CHUNKS * ROWS, CHUNK)).to(base_ptr.dtype.element_ty)
            tl.store(base_ptr + tile_index * TILE + offsets, merged, cache_modifier=".cs")
    else:
        # Each tile is on its way while the one before it is worked on. It will not be read again soon.
        coming = tl.load(base_ptr + offsets, eviction_policy="evict_first")
        for tile_index in range(TILES):
            here = rows + tile_index * ROWS
            tile = tl.reshape(coming, (CHUNKS, ROWS, CHUNK)).to(tl.float32)
            following = base_ptr + (tile_index + 1) * TILE + offsets
            more = tl.full([CHUNKS * ROWS, 1], tile_index + 1, tl.int32) < TILES
            coming = tl.load(following, mask=more, other=0.0, eviction_policy="evict_first")
            value = append_decode(
                tile,
                here,
                base_receptance,
                coefficients,
                key_receptance,
                log_updates_ptr,
                live,
                v_ptr,
                out_ptr,
                V,
                ENTRIES,
            )
            tl.store(log_updates_ptr + live * V + here, value.to(log_updates_ptr.dtype.element_ty))
        if split == 0:
            tl.store(log_decays_ptr + live * K + channel, decay_ln)
            tl.store(log_keys_ptr + live * K + channel, key.to(log_keys_ptr.dtype.element_ty))

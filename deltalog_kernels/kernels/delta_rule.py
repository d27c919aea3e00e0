"""One decode step of GDN or KDA: a program reads some value rows of one head's base once.

It answers from base and log, then appends the token's entry or merges; which, its row's position says.
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
    base_key,
    base_query,
    key_coefficients,
    query_coefficients,
    key_query,
    beta,
    log_updates,
    live,
    value,
    out,
    V: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """The paper's AppendDecode: a tile's output, stored, and the token's update of its value rows [R].

    tile [C, R, J] is the base, base_key and base_query [C, 1, J] carry its decay; the coefficients
    [ENTRIES, 1] are the log's, key_query the product of the undecayed two. log_updates, value and out
    point to one head.
    """
    entry = tl.arange(0, ENTRIES)[:, None]
    updates = tl.load(log_updates + entry * V + rows[None, :], mask=entry < live, other=0.0).to(tl.float32)
    seen_key = row_sums(tile * base_key) + tl.sum(key_coefficients * updates, 0)
    seen_query = row_sums(tile * base_query) + tl.sum(query_coefficients * updates, 0)
    update = beta * (tl.load(value + rows).to(tl.float32) - seen_key)
    tl.store(out + rows, (seen_query + key_query * update).to(out.dtype.element_ty))
    return update


@triton.jit
def softplus(x):
    """log(1 + e^x), also where 1 + e^x rounds."""
    power = tl.exp(x)
    above = 1.0 + power
    # What rounding took from `above`, its logarithm gets back; x itself where e^x may overflow.
    kept = tl.where(above == 1.0, 1.0, above - 1.0)
    return tl.where(x > 20.0, x, tl.where(above == 1.0, power, tl.log(above) * (power / kept)))


@triton.jit
def delta_rule_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    gate_ptr,
    beta_ptr,
    a_log_ptr,
    dt_bias_ptr,
    out_ptr,
    base_ptr,
    log_keys_ptr,
    log_updates_ptr,
    log_decays_ptr,
    slot_ids_ptr,
    positions_ptr,
    q_stride,
    k_stride,
    v_stride,
    gate_stride,
    beta_stride,
    out_stride,
    base_stride,
    log_keys_stride,
    log_updates_stride,
    log_decays_stride,
    phase_offset,
    scale,
    lower_bound,
    HEADS_RATIO: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    GATES: tl.constexpr,
    RAW_GATES: tl.constexpr,
    BOUNDED: tl.constexpr,
    PHASE: tl.constexpr,
    NULL_SLOT: tl.constexpr,
    DECAY_LN_MIN: tl.constexpr,
    EPS: tl.constexpr,
    CHUNK: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    SPLITS: tl.constexpr = V // (ROWS * TILES)
    program = tl.program_id(0)
    split = program % SPLITS
    hv = (program // SPLITS) % HV
    row = (program // (SPLITS * HV)).to(tl.int64)
    h = hv // HEADS_RATIO
    rows = split * (ROWS * TILES) + tl.arange(0, ROWS)
    slot = tl.load(slot_ids_ptr + row).to(tl.int64)
    out_ptr += row * out_stride + hv * V
    if slot <= NULL_SLOT:
        for tile_index in range(TILES):
            tl.store(out_ptr + tile_index * ROWS + rows, tl.zeros([ROWS], out_ptr.dtype.element_ty))
        return
    base_ptr += slot * base_stride + hv * (V * K)
    channel = channel_offsets(K, CHUNK)
    TILE: tl.constexpr = ROWS * K
    CHUNKS: tl.constexpr = K // CHUNK
    base_ptr += split * (TILES * TILE)
    offsets = tile_offsets(K, CHUNK, ROWS)
    live = live_entries(tl.load(positions_ptr + row), phase_offset, M)
    log_keys_ptr += slot * log_keys_stride + h * ((M - 1) * K)
    log_updates_ptr += slot * log_updates_stride + hv * ((M - 1) * V)
    log_decays_ptr += slot * log_decays_stride + hv * ((M - 1) * GATES)
    v_ptr += row * v_stride + hv * V

    raw_key = tl.load(k_ptr + row * k_stride + h * K + channel).to(tl.float32)
    query = tl.load(q_ptr + row * q_stride + h * K + channel).to(tl.float32)
    inverse_norm = tl.rsqrt(tl.sum(raw_key * raw_key) + EPS)
    key = raw_key * inverse_norm
    query = query * (tl.rsqrt(tl.sum(query * query) + EPS) * scale)
    gate_channel = channel if GATES > 1 else tl.zeros([1, 1], tl.int32)
    decay_ln = tl.load(gate_ptr + row * gate_stride + hv * GATES + gate_channel).to(tl.float32)
    beta = tl.load(beta_ptr + row * beta_stride + hv).to(tl.float32)
    if RAW_GATES:
        rate = tl.exp(tl.load(a_log_ptr + hv).to(tl.float32))
        gate = decay_ln + tl.load(dt_bias_ptr + hv * GATES + gate_channel).to(tl.float32)
        decay_ln = lower_bound * tl.sigmoid(rate * gate) if BOUNDED else -rate * softplus(gate)
        beta = tl.sigmoid(beta)
    decay_ln = clamped(decay_ln, DECAY_LN_MIN)

    decayed_keys, total = replay_prep(
        log_keys_ptr, log_decays_ptr, decay_ln, live, channel, gate_channel, K, GATES, ENTRIES
    )
    key_coefficients = entry_sums(decayed_keys * key)[:, None]
    query_coefficients = entry_sums(decayed_keys * query)[:, None]
    key_query = tl.sum(key * query)
    base_key, base_query = (key * total)[:, None, :], (query * total)[:, None, :]

    if merges_now(live, M, PHASE):
        for tile_index in range(TILES):
            here = rows + tile_index * ROWS
            tile = tl.reshape(tl.load(base_ptr + tile_index * TILE + offsets), (CHUNKS, ROWS, CHUNK)).to(
                tl.float32
            )
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
                v_ptr,
                out_ptr,
                V,
                ENTRIES,
            )
            tile = tile * total[:, None, :] + raw_key[:, None, :] * (update * inverse_norm)[None, :, None]
            tile = add_full_log(
                tile,
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
                v_ptr,
                out_ptr,
                V,
                ENTRIES,
            )
            # The log keeps the key as it came; its norm moves into the update (see SlotMemory).
            update = update * inverse_norm
            tl.store(log_updates_ptr + live * V + here, update.to(log_updates_ptr.dtype.element_ty))
        if split == 0:
            tl.store(log_decays_ptr + live * GATES + gate_channel, decay_ln)
            # One of the value heads that share the key writes it.
            if hv % HEADS_RATIO == 0:
                tl.store(log_keys_ptr + live * K + channel, raw_key.to(log_keys_ptr.dtype.element_ty))

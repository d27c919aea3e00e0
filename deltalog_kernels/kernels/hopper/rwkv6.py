"""One decode step of RWKV6: as the delta rule's, but the update is the value itself.

The output reads the state before the token's decay, so the entries are aged without it and the merge
ages them once more.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.extra.cuda import gdc_wait

from deltalog_kernels.kernels.hopper.replay import (
    add_log,
    answer,
    clamped,
    coefficients,
    live_entries,
    load_updates,
    load_values,
    merges_now,
    replay_prep,
    share,
    share_updates,
    tile_updates,
)
from deltalog_kernels.kernels.hopper.tiles import (
    channel_offsets,
    channel_sum,
    channels,
    column,
    fetch_after_read,
    fetch_after_write,
    fetch_first,
    once,
    read_tile,
    store_zeros,
    write_tile,
)


@gluon.jit
def append_decode(
    state,
    tile,
    base_receptance,
    log_coefficients,
    key_receptance,
    updates,
    values,
    out,
    ENTRIES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """The paper's AppendDecode: a tile's output, stored, and the token's values of its rows [R].

    state [R, C, J] is the base, base_receptance [C, J] carries its decay; log_coefficients [1, E] are the
    log's, key_receptance the bonus's. updates and values are shared, out is a pointer.
    """
    R: gl.constexpr = state.shape[0]
    rows = tile * R + gl.arange(0, R, layout=column(state.shape[2], num_warps))
    logged = tile_updates(updates, tile, ENTRIES, num_warps)
    value = values.gather(rows, 0)
    seen = answer(state, base_receptance, log_coefficients, logged, num_warps)
    gl.store(out + rows, (seen + key_receptance * value).to(out.dtype.element_ty))
    return value


@gluon.jit
def rwkv6_kernel(
    r_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    bonus_ptr,
    out_ptr,
    base,
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
    slot_lines,
    log_keys_stride,
    log_updates_stride,
    log_decays_stride,
    phase_offset,
    scale,
    H: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    M: gl.constexpr,
    RAW_DECAY: gl.constexpr,
    PHASE: gl.constexpr,
    NULL_SLOT: gl.constexpr,
    DECAY_LN_MIN: gl.constexpr,
    ENTRIES: gl.constexpr,
    ROWS: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """base is a descriptor of the pool as lines of J channels, slot_lines a slot's; the rest is as in the
    portable kernel."""
    J: gl.constexpr = base.block_shape[1]
    C: gl.constexpr = K // J
    SPLITS: gl.constexpr = V // (ROWS * TILES)
    program = gl.program_id(0)
    split = program % SPLITS
    h = (program // SPLITS) % H
    row = (program // (SPLITS * H)).to(gl.int64)
    first_row = split * (ROWS * TILES)
    rows = gl.arange(0, ROWS, layout=column(J, num_warps))
    # With launch_pdl the kernel before this one may still run, and write what we read.
    gdc_wait()
    slot = gl.load(slot_ids_ptr + row)
    # What does not depend on the slot is on its way meanwhile.
    channel = channel_offsets(K, J, channels(J, num_warps))
    key = gl.load(k_ptr + row * k_stride + h * K + channel).to(gl.float32)
    receptance = gl.load(r_ptr + row * r_stride + h * K + channel).to(gl.float32) * scale
    bonus = gl.load(bonus_ptr + h * K + channel).to(gl.float32)
    gate_channel = channel_offsets(K, J, once(num_warps))
    decay_ln = gl.load(decay_ptr + row * decay_stride + h * K + gate_channel).to(gl.float32)
    out_ptr += row * out_stride + h * V + first_row
    if slot <= NULL_SLOT:
        store_zeros(out_ptr, rows, TILES)
        return

    first_line = (slot * slot_lines + (h * V + first_row) * C).to(gl.int32)
    buffers, arrived = fetch_first(base, first_line, STAGES)
    slot = slot.to(gl.int64)
    live = live_entries(gl.load(positions_ptr + row), phase_offset, M)
    log_keys_ptr += slot * log_keys_stride + h * ((M - 1) * K)
    log_updates_ptr += slot * log_updates_stride + h * ((M - 1) * V) + first_row
    log_decays_ptr += slot * log_decays_stride + h * ((M - 1) * K)
    logged = load_updates(log_updates_ptr, live, ROWS * TILES, V, ENTRIES, num_warps)
    values = load_values(v_ptr + row * v_stride + h * V + first_row, ROWS * TILES, num_warps)
    if RAW_DECAY:
        decay_ln = -gl.exp(decay_ln)
    decay_ln = clamped(decay_ln, DECAY_LN_MIN)

    keys, weights, total = replay_prep(
        log_keys_ptr, log_decays_ptr, gl.zeros_like(key), live, channel, K, J, M, K, ENTRIES, num_warps
    )
    log_coefficients = coefficients(keys, weights, receptance, num_warps)
    key_receptance = channel_sum(receptance * bonus * key)
    base_receptance = receptance * total
    updates = share_updates(logged, ROWS)
    values = share(values)

    if merges_now(live, M, PHASE):
        decay = gl.convert_layout(gl.exp(decay_ln), channels(J, num_warps))[None, :, :]
        decayed_keys = share((keys * decay).reshape([ENTRIES * C, J]))
        decay = decay * total[None, :, :]
        for tile in range(TILES):
            state = read_tile(buffers, arrived, tile, ROWS, num_warps)
            value = append_decode(
                state,
                tile,
                base_receptance,
                log_coefficients,
                key_receptance,
                updates,
                values,
                out_ptr,
                ENTRIES,
                num_warps,
            )
            state = state * decay + key[None, :, :] * value[:, None, None]
            state = add_log(state, decayed_keys, updates, tile, M, ENTRIES, num_warps)
            fetch_after_write(base, first_line, buffers, arrived, tile, TILES)
            write_tile(base, first_line, buffers, tile, state, num_warps)
        tma.store_wait(0)
    else:
        for tile in range(TILES):
            state = read_tile(buffers, arrived, tile, ROWS, num_warps)
            value = append_decode(
                state,
                tile,
                base_receptance,
                log_coefficients,
                key_receptance,
                updates,
                values,
                out_ptr,
                ENTRIES,
                num_warps,
            )
            fetch_after_read(base, first_line, buffers, arrived, tile, TILES)
            entry = value.to(log_updates_ptr.dtype.element_ty)
            gl.store(log_updates_ptr + live * V + tile * ROWS + rows, entry)
        if split == 0:
            gl.store(log_decays_ptr + live * K + gate_channel, decay_ln)
            gl.store(log_keys_ptr + live * K + channel, key.to(log_keys_ptr.dtype.element_ty))

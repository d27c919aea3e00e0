"""One decode step of GDN or KDA: a program has tiles of one head's base copied in, all it can hold at once.

While they come it works out what the log asks of them; then it answers tile by tile, and appends the
token's entry, or merges and has the tile copied back. Which, its row's position says.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import sigmoid as triton_sigmoid
from triton.language.extra.cuda import gdc_wait

from deltalog_kernels.kernels import delta_rule
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

# What has no layout is the portable kernel's own.
softplus = gluon.jit(delta_rule.softplus.fn)
sigmoid = gluon.jit(triton_sigmoid.fn)


@gluon.jit
def append_decode(
    state,
    tile,
    base_key,
    base_query,
    key_coefficients,
    query_coefficients,
    key_query,
    beta,
    updates,
    values,
    out,
    ENTRIES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """The paper's AppendDecode: a tile's output, stored, and the token's update of its value rows [R].

    state [R, C, J] is the base, base_key and base_query [C, J] carry its decay; the coefficients [1, E] are
    the log's, key_query the product of the undecayed two. updates and values are shared, out is a pointer.
    """
    R: gl.constexpr = state.shape[0]
    rows = tile * R + gl.arange(0, R, layout=column(state.shape[2], num_warps))
    logged = tile_updates(updates, tile, ENTRIES, num_warps)
    update = beta * (values.gather(rows, 0) - answer(state, base_key, key_coefficients, logged, num_warps))
    seen = answer(state, base_query, query_coefficients, logged, num_warps)
    gl.store(out + rows, (seen + key_query * update).to(out.dtype.element_ty))
    return update


@gluon.jit
def delta_rule_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    gate_ptr,
    beta_ptr,
    a_log_ptr,
    dt_bias_ptr,
    out_ptr,
    base,
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
    slot_lines,
    log_keys_stride,
    log_updates_stride,
    log_decays_stride,
    phase_offset,
    scale,
    lower_bound,
    HEADS_RATIO: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    M: gl.constexpr,
    GATES: gl.constexpr,
    RAW_GATES: gl.constexpr,
    BOUNDED: gl.constexpr,
    PHASE: gl.constexpr,
    NULL_SLOT: gl.constexpr,
    DECAY_LN_MIN: gl.constexpr,
    EPS: gl.constexpr,
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
    hv = (program // SPLITS) % HV
    row = (program // (SPLITS * HV)).to(gl.int64)
    h = hv // HEADS_RATIO
    first_row = split * (ROWS * TILES)
    rows = gl.arange(0, ROWS, layout=column(J, num_warps))
    # With launch_pdl the kernel before this one may still run, and write what we read.
    gdc_wait()
    slot = gl.load(slot_ids_ptr + row)
    # What does not depend on the slot is on its way meanwhile.
    channel = channel_offsets(K, J, channels(J, num_warps))
    raw_key = gl.load(k_ptr + row * k_stride + h * K + channel).to(gl.float32)
    raw_query = gl.load(q_ptr + row * q_stride + h * K + channel).to(gl.float32)
    beta = gl.load(beta_ptr + row * beta_stride + hv).to(gl.float32)
    gate_channel = 0 if GATES == 1 else channel_offsets(K, J, once(num_warps))
    decay_ln = gl.load(gate_ptr + row * gate_stride + hv * GATES + gate_channel).to(gl.float32)
    out_ptr += row * out_stride + hv * V + first_row
    if slot <= NULL_SLOT:
        store_zeros(out_ptr, rows, TILES)
        return

    first_line = (slot * slot_lines + (hv * V + first_row) * C).to(gl.int32)
    buffers, arrived = fetch_first(base, first_line, STAGES)
    slot = slot.to(gl.int64)
    live = live_entries(gl.load(positions_ptr + row), phase_offset, M)
    log_keys_ptr += slot * log_keys_stride + h * ((M - 1) * K)
    log_updates_ptr += slot * log_updates_stride + hv * ((M - 1) * V) + first_row
    log_decays_ptr += slot * log_decays_stride + hv * ((M - 1) * GATES)
    logged = load_updates(log_updates_ptr, live, ROWS * TILES, V, ENTRIES, num_warps)
    values = load_values(v_ptr + row * v_stride + hv * V + first_row, ROWS * TILES, num_warps)

    inverse_norm = gl.rsqrt(channel_sum(raw_key * raw_key) + EPS)
    query_scale = gl.rsqrt(channel_sum(raw_query * raw_query) + EPS) * scale
    if RAW_GATES:
        rate = gl.exp(gl.load(a_log_ptr + hv).to(gl.float32))
        gate = decay_ln + gl.load(dt_bias_ptr + hv * GATES + gate_channel).to(gl.float32)
        decay_ln = lower_bound * sigmoid(rate * gate) if BOUNDED else -rate * softplus(gate)
        beta = sigmoid(beta)
    decay_ln = clamped(decay_ln, DECAY_LN_MIN)
    own_decay_ln = decay_ln if GATES == 1 else gl.convert_layout(decay_ln, channels(J, num_warps))

    keys, weights, total = replay_prep(
        log_keys_ptr, log_decays_ptr, own_decay_ln, live, channel, K, J, M, GATES, ENTRIES, num_warps
    )
    key_coefficients = coefficients(keys, weights * inverse_norm, raw_key, num_warps)
    query_coefficients = coefficients(keys, weights * query_scale, raw_query, num_warps)
    key_query = channel_sum(raw_key * raw_query) * (inverse_norm * query_scale)
    base_key, base_query = raw_key * (total * inverse_norm), raw_query * (total * query_scale)
    updates = share_updates(logged, ROWS)
    values = share(values)

    if merges_now(live, M, PHASE):
        decay = total if GATES == 1 else total[None, :, :]
        decayed_keys = share((keys * weights[:, None, None]).reshape([ENTRIES * C, J]))
        for tile in range(TILES):
            state = read_tile(buffers, arrived, tile, ROWS, num_warps)
            update = append_decode(
                state,
                tile,
                base_key,
                base_query,
                key_coefficients,
                query_coefficients,
                key_query,
                beta,
                updates,
                values,
                out_ptr,
                ENTRIES,
                num_warps,
            )
            state = state * decay + raw_key[None, :, :] * (update * inverse_norm)[:, None, None]
            state = add_log(state, decayed_keys, updates, tile, M, ENTRIES, num_warps)
            fetch_after_write(base, first_line, buffers, arrived, tile, TILES)
            write_tile(base, first_line, buffers, tile, state, num_warps)
        tma.store_wait(0)
    else:
        for tile in range(TILES):
            state = read_tile(buffers, arrived, tile, ROWS, num_warps)
            update = append_decode(
                state,
                tile,
                base_key,
                base_query,
                key_coefficients,
                query_coefficients,
                key_query,
                beta,
                updates,
                values,
                out_ptr,
                ENTRIES,
                num_warps,
            )
            fetch_after_read(base, first_line, buffers, arrived, tile, TILES)
            # The log keeps the key as it came; its norm moves into the update (see SlotMemory).
            entry = (update * inverse_norm).to(log_updates_ptr.dtype.element_ty)
            gl.store(log_updates_ptr + live * V + tile * ROWS + rows, entry)
        if split == 0:
            gl.store(log_decays_ptr + live * GATES + gate_channel, decay_ln)
            # One of the value heads that share the key writes it.
            if hv % HEADS_RATIO == 0:
                gl.store(log_keys_ptr + live * K + channel, raw_key.to(log_keys_ptr.dtype.element_ty))

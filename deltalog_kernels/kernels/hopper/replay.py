"""Reading a log: what its entries answer, and adding them to a tile in the merge.

Layouts are those of tiles.py. A log has at least eight entries here, dead ones being zero: the eight lanes
that share a row of the base share its entries too, and sum both at once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltalog_kernels.kernels import replay
from deltalog_kernels.kernels.hopper.tiles import channels, column, dots, eighths

# What has no layout is the portable kernels' own.
clamped = gluon.jit(replay.clamped.fn)
live_entries = gluon.jit(replay.live_entries.fn)
merges_now = gluon.jit(replay.merges_now.fn)


@gluon.constexpr_function
def entries_by_rows(rows, num_warps):
    """Layout of [entries, rows], sixteen bytes a lane, as memory has them."""
    lanes = min(32, rows // 4)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def rows_by_entries(num_warps):
    """Layout of [entries, rows] that is eighths when transposed."""
    return gl.BlockedLayout([1, 1], [8, 4], [1, num_warps], [0, 1])


@gluon.jit
def replay_prep(
    log_keys,
    log_decays,
    decay_ln,
    live,
    channel,
    K: gl.constexpr,
    J: gl.constexpr,
    M: gl.constexpr,
    GATES: gl.constexpr,
    ENTRIES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """The paper's ReplayPrep: one head's keys [E, C, J], 0 where dead, their weights [E], and e^G.

    Key times weight is the key decayed to now: where a head has one gate the decay is the weight, else it is
    in the key and the weight is 1. log_keys [M-1, K] and log_decays [M-1, GATES] are pointers. decay_ln, the
    log-decay that comes on top, and e^G are [C, J], or scalars for one gate. Log-decays are summed entry by
    entry: a difference of running totals would lose the small ones that follow a large one.
    """
    entry = gl.arange(0, ENTRIES, layout=column(J, num_warps))[:, None, None]
    keys = gl.load(log_keys + entry * K + channel[None, :, :], mask=entry < live, other=0.0).to(gl.float32)
    # An entry is aged by those after it.
    if GATES == 1:
        older = gl.arange(0, ENTRIES, layout=gl.SliceLayout(1, eighths(num_warps)))[:, None]
        newer = gl.arange(0, ENTRIES, layout=gl.SliceLayout(0, eighths(num_warps)))[None, :]
        decays = gl.load(log_decays + newer, mask=newer < live, other=0.0)
        ages = gl.sum(gl.where(newer > older, decays, 0.0), 1) + decay_ln
        weights = gl.exp(gl.convert_layout(ages, column(J, num_warps)))
        total = gl.sum(gl.sum(decays, 1), 0) + decay_ln
    else:
        ages = gl.zeros_like(keys) + decay_ln[None, :, :]
        total = gl.load(log_decays + channel, mask=channel < live * K, other=0.0) + decay_ln
        for newer in gl.static_range(1, M - 1):
            decays = gl.load(log_decays + newer * K + channel, mask=channel < (live - newer) * K, other=0.0)
            ages += gl.where(entry < newer, decays[None, :, :], 0.0)
            total += decays
        keys = keys * gl.exp(ages)
        weights = gl.full([ENTRIES], 1.0, gl.float32, column(J, num_warps))
    return keys, weights, gl.exp(total)


@gluon.jit
def coefficients(keys, weights, vector, num_warps: gl.constexpr):
    """Products over K of weighted entries [E, C, J] with a vector [C, J], as [1, E] for answer."""
    products = gl.sum(dots(keys, vector, num_warps), 1)
    products = products * gl.convert_layout(weights, gl.SliceLayout(1, eighths(num_warps)))
    return gl.convert_layout(products, gl.SliceLayout(0, eighths(num_warps)))[None, :]


@gluon.jit
def load_updates(
    log_updates,
    live,
    ROWS: gl.constexpr,
    V: gl.constexpr,
    ENTRIES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """The log's updates of ROWS value rows [E, ROWS], 0 where dead; log_updates points to the first row."""
    layout: gl.constexpr = entries_by_rows(ROWS, num_warps)
    entry = gl.arange(0, ENTRIES, layout=gl.SliceLayout(1, layout))[:, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))[None, :]
    return gl.load(log_updates + entry * V + row, mask=entry < live, other=0.0).to(gl.float32)


@gluon.jit
def load_values(values, ROWS: gl.constexpr, num_warps: gl.constexpr):
    """A token's values of ROWS value rows in fp32; the pointer is to the first."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, entries_by_rows(ROWS, num_warps)))
    return gl.load(values + row).to(gl.float32)


@gluon.jit
def share(values):
    """Put [n] or [n, m] where every thread can read it."""
    rank: gl.constexpr = len(values.shape)
    order: gl.constexpr = [0] if rank == 1 else [1, 0]
    return gl.allocate_shared_memory(
        values.dtype, values.shape, gl.SwizzledSharedLayout(1, 1, 1, order), values
    )


@gluon.jit
def share_updates(updates, ROWS: gl.constexpr):
    """Share updates [E, TILES ROWS], cut into tiles of E entries: [TILES E, ROWS]."""
    E: gl.constexpr = updates.shape[0]
    TILES: gl.constexpr = updates.shape[1] // ROWS
    return share(updates.reshape([E, TILES, ROWS]).permute([1, 0, 2]).reshape([TILES * E, ROWS]))


@gluon.jit
def tile_updates(updates, tile, ENTRIES: gl.constexpr, num_warps: gl.constexpr):
    """A tile's shared updates as [R, E]."""
    ROWS: gl.constexpr = updates.shape[1]
    layout: gl.constexpr = rows_by_entries(num_warps)
    entry = tile * ENTRIES + gl.arange(0, ENTRIES, layout=gl.SliceLayout(1, layout))
    index = entry[:, None] + gl.zeros([ENTRIES, ROWS], gl.int32, layout)
    return gl.convert_layout(updates.gather(index, 0).permute([1, 0]), eighths(num_warps))


@gluon.jit
def answer(state, vector, coefficient, updates, num_warps: gl.constexpr):
    """What base and log answer to a vector, [R]: state [R, C, J] times vector [C, J], plus updates [R, E]
    times coefficient [1, E]."""
    R: gl.constexpr = state.shape[0]
    J: gl.constexpr = state.shape[2]
    E: gl.constexpr = updates.shape[1]
    of_log = gl.sum((updates * coefficient).reshape([R, E // 8, 8]), 1)
    parts = dots(state, vector, num_warps) + gl.convert_layout(of_log, eighths(num_warps))
    return gl.convert_layout(gl.sum(parts, 1), column(J, num_warps))


@gluon.jit
def add_log(state, keys, updates, tile, M: gl.constexpr, ENTRIES: gl.constexpr, num_warps: gl.constexpr):
    """Add a full log to a tile [R, C, J]. Shared are its decayed keys [E C, J] and updates."""
    R: gl.constexpr = state.shape[0]
    C: gl.constexpr = state.shape[1]
    J: gl.constexpr = state.shape[2]
    for entry in gl.static_range(M - 1):
        key = keys.slice(entry * C, C).load(channels(J, num_warps))
        index = gl.zeros([1, R], gl.int32, rows_by_entries(num_warps)) + (tile * ENTRIES + entry)
        update = gl.convert_layout(updates.gather(index, 0).reshape([R]), column(J, num_warps))
        state += key[None, :, :] * update[:, None, None]
    return state

"""What the kernels of all families share: how channels lie in a warp, reading a log, and the merge.

A program is one warp. A row of K channels is [C, J]: C chunks of J consecutive channels, J spanning eight
lanes. In a tile of the base state [C, R, J] the other four lanes hold other rows, so that a row's sum over
K is mostly within a thread; in a log [E, C, J] they hold other chunks, so that a sum over entries is. Both
are loaded with their first two axes flattened: which of two axes gets the lanes would else be up to
Triton's version.
"""

import triton
import triton.language as tl

APPEND, MERGE = tl.constexpr(1), tl.constexpr(2)
"""The phase that all rows of a batch are in, where the caller says so; 0 is a batch in any phases."""


@triton.jit
def channel_offsets(K: tl.constexpr, CHUNK: tl.constexpr):
    """0 ... K-1 as [C, J]."""
    return tl.arange(0, K // CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]


@triton.jit
def tile_offsets(K: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """Offsets of ROWS consecutive value rows of a base, flattened to [C R, J]."""
    flat = tl.arange(0, K // CHUNK * ROWS)[:, None]
    return flat % ROWS * K + flat // ROWS * CHUNK + tl.arange(0, CHUNK)[None, :]


@triton.jit
def row_sums(tile):
    """[C, R, J] -> [R]: the sums over K, in an order that does not depend on R."""
    return tl.sum(tl.sum(tile, 0), 1)


@triton.jit
def entry_sums(log):
    """[E, C, J] -> [E]: the sums over K."""
    return tl.sum(tl.sum(log, 2), 1)


@triton.jit
def live_entries(position, phase_offset, M: tl.constexpr):
    """layout.live_length on the device, phase_offset being from 0 to M - 1."""
    # The remainder of a negative number is negative here, unlike Python's.
    return ((position % M + phase_offset + M) % M).to(tl.int32)


@triton.jit
def merges_now(live, M: tl.constexpr, PHASE: tl.constexpr):
    """Whether a row merges: its log is full, unless the caller says that all append or merge."""
    merging = live == M - 1
    if PHASE == APPEND:
        merging = False
    if PHASE == MERGE:
        merging = True
    return merging


@triton.jit
def clamped(decay_ln, DECAY_LN_MIN: tl.constexpr):
    """The log-decay, DECAY_LN_MIN at least; one that is NaN stays so, and shows in the output."""
    return tl.maximum(decay_ln, DECAY_LN_MIN, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def replay_prep(
    log_keys,
    log_decays,
    decay_ln,
    live,
    channel,
    gate_channel,
    K: tl.constexpr,
    GATES: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """The paper's ReplayPrep: one head's keys decayed to now [E, C, J], 0 where dead, and e^G.

    log_keys [M-1, K] and log_decays [M-1, GATES] are pointers. decay_ln, the log-decay that comes on top,
    and e^G are [C, J], or [1, 1] where a head has one gate. Log-decays are summed entry by entry: a
    difference of running totals would lose the small ones that follow a large one.
    """
    C: tl.constexpr = channel.shape[0]
    J: tl.constexpr = channel.shape[1]
    flat = tl.arange(0, ENTRIES * C)[:, None]
    entry, offset = flat // C, flat % C * J + tl.arange(0, J)[None, :]
    keys = tl.load(log_keys + entry * K + offset, mask=entry < live, other=0.0).to(tl.float32)
    oldest = tl.load(log_decays + gate_channel, mask=gate_channel < live * GATES, other=0.0)
    # An entry is aged by those after it.
    if GATES == 1:
        later = tl.arange(0, ENTRIES)[None, :]
        decays = tl.load(log_decays + later, mask=(later < live) & (later > 0), other=0.0)
        following = tl.where(later > tl.arange(0, ENTRIES)[:, None], decays, 0.0)
        ages = tl.sum(following, 1)[:, None, None] + decay_ln
        total = tl.sum(decays) + oldest + decay_ln
    else:
        following = tl.load(log_decays + (entry + 1) * K + offset, mask=entry + 1 < live, other=0.0)
        following = tl.reshape(following, (ENTRIES, C, J))
        ages = tl.cumsum(following, 0, reverse=True) + decay_ln
        total = tl.sum(following, 0) + oldest + decay_ln
    return tl.reshape(keys, (ENTRIES, C, J)) * tl.exp(ages), tl.exp(total)


@triton.jit
def add_entry(
    tile,
    age,
    log_keys,
    log_updates,
    log_decays,
    entry,
    channel,
    gate_channel,
    rows,
    K: tl.constexpr,
    V: tl.constexpr,
    GATES: tl.constexpr,
):
    """Add e^{age} k u^T of one log entry to a tile [C, R, J]; the age of the entry before it.

    The pointers are one head's. age, channel and gate_channel are [C, J] (or [1, 1] for one gate), rows [R]
    the tile's value rows. Entries are added newest first, so no age is ever subtracted.
    """
    key = tl.load(log_keys + entry * K + channel).to(tl.float32) * tl.exp(age)
    update = tl.load(log_updates + entry * V + rows).to(tl.float32)
    decay_ln = tl.load(log_decays + entry * GATES + gate_channel)
    return tile + key[:, None, :] * update[None, :, None], age + decay_ln


@triton.jit
def add_full_log(
    tile,
    age,
    log_keys,
    log_updates,
    log_decays,
    channel,
    gate_channel,
    rows,
    K: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    GATES: tl.constexpr,
):
    """Add all M - 1 entries to a tile, arguments as in add_entry; age is that of the newest."""
    for back in tl.static_range(M - 1):
        tile, age = add_entry(
            tile,
            age,
            log_keys,
            log_updates,
            log_decays,
            M - 2 - back,
            channel,
            gate_channel,
            rows,
            K,
            V,
            GATES,
        )
    return tile

"""What the kernels of all families share: how channels lie in a warp, reading a log, and the merge.

A program is one warp. A row of K channels is [C, J]: C chunks of J consecutive channels, J spanning eight
lanes. In a tile of the base state [R, C, J] the other four lanes hold other rows, so that a row's sum over
K is mostly within a thread; in a log [C, E, J] they hold other chunks, so that a sum over entries is.
"""

import triton
import triton.language as tl


@triton.jit
def channel_offsets(K: tl.constexpr, CHUNK: tl.constexpr):
    """0 ... K-1 as [C, 1, J], the shape in which a head's vectors are worked out."""
    return tl.arange(0, K // CHUNK)[:, None, None] * CHUNK + tl.arange(0, CHUNK)[None, None, :]


@triton.jit
def as_row(vector):
    """[C, 1, J] -> [1, C, J], the shape in which a vector meets a tile."""
    return tl.permute(vector, (1, 0, 2))


@triton.jit
def row_sums(tile):
    """[R, C, J] -> [R]: the sums over K, in an order that does not depend on R."""
    return tl.sum(tl.sum(tile, 1), 1)


@triton.jit
def entry_sums(log):
    """[C, E, J] -> [E]: the sums over K."""
    return tl.sum(tl.sum(log, 2), 0)


@triton.jit
def live_entries(position, phase_offset, M: tl.constexpr):
    """layout.live_length on the device."""
    return ((position + phase_offset) % M).to(tl.int32)


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
    """The paper's ReplayPrep: one head's keys decayed to now [C, E, J], 0 where dead, and e^G.

    log_keys [M-1, K] and log_decays [M-1, GATES] are pointers. decay_ln, the log-decay that comes on top,
    and e^G are [C, 1, J], or [1, 1, 1] where a head has one gate. Log-decays are summed entry by entry: a
    difference of running totals would lose the small ones that follow a large one.
    """
    entry = tl.arange(0, ENTRIES)[None, :, None]
    keys = tl.load(log_keys + entry * K + channel, mask=entry < live, other=0.0).to(tl.float32)
    oldest = tl.load(log_decays + gate_channel, mask=gate_channel < live * GATES, other=0.0)
    # An entry is aged by those after it.
    if GATES == 1:
        later = tl.arange(0, ENTRIES)[None, :]
        decays = tl.load(log_decays + later, mask=(later < live) & (later > 0), other=0.0)
        following = tl.where(later > tl.arange(0, ENTRIES)[:, None], decays, 0.0)
        ages = tl.sum(following, 1)[None, :, None] + decay_ln
        total = tl.sum(decays) + oldest + decay_ln
    else:
        following = tl.load(log_decays + (entry + 1) * K + channel, mask=entry + 1 < live, other=0.0)
        ages = tl.cumsum(following, 1, reverse=True) + decay_ln
        total = tl.sum(following, 1)[:, None, :] + oldest + decay_ln
    return keys * tl.exp(ages), tl.exp(total)


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
    """Add e^{age} k u^T of one log entry to a tile [R, C, J]; the age of the entry before it.

    The pointers are one head's. age, channel and gate_channel are rows [1, C, J] (or [1, 1, 1] for one
    gate), rows [R] the tile's value rows. Entries are added newest first, so no age is ever subtracted.
    """
    key = tl.load(log_keys + entry * K + channel).to(tl.float32) * tl.exp(age)
    update = tl.load(log_updates + entry * V + rows).to(tl.float32)
    decay_ln = tl.load(log_decays + entry * GATES + gate_channel)
    return tile + key * update[:, None, None], age + decay_ln

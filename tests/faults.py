"""Seeded faults: those that this design invites. tests/long.py puts each into a copy of the project, and a
test must catch it. A suite that passes says little until it is known to fail.
"""

from dataclasses import dataclass

STEPS, LIFE = "tests/kernels/test_steps.py", "tests/plugin/test_equivalence.py"
TRITON = "tests/kernels/test_triton.py"


@dataclass(frozen=True)
class Fault:
    """``right`` occurs once in ``file`` and becomes ``wrong``; ``tests`` must then fail."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str = STEPS


FAULTS = [
    Fault(
        "live length off by one",
        "deltalog_kernels/cpu.py",
        "dead = (torch.arange(layout.capacity) >= rows.live[:, None])",
        "dead = (torch.arange(layout.capacity) > rows.live[:, None])",
    ),
    Fault(
        "neutral fill skipped",
        "deltalog_kernels/cpu.py",
        "    fill(memory, slots, live_length(ends, interval, phase_offset))",
        "    pass",
    ),
    Fault(
        "fold before a chunk skipped",
        "deltalog_kernels/cpu.py",
        "if (live > 0).any():",
        "if False:",
    ),
    Fault(
        "fold before a chunk skipped in the layer",
        "deltalog_kernels/vllm_plugin/layers.py",
        "starts, ends = metadata.starts[first:], metadata.ends[first:]",
        "starts, ends = metadata.starts[first:] * 0, metadata.ends[first:]",
        f"{LIFE}::test_a_live_log_is_folded_before_a_chunk",
    ),
    Fault(
        "layer's phase left out of the fold",
        "deltalog_kernels/vllm_plugin/layers.py",
        "starts, ends, phase_offset=self.phase_offset)",
        "starts, ends, phase_offset=0)",
        f"{LIFE}::test_a_live_log_is_folded_before_a_chunk",
    ),
    Fault(
        "layers that all merge at once",
        "deltalog_kernels/vllm_plugin/pages.py",
        'count("linear_attention")',
        'count("linear attention")',
        "tests/plugin/test_counters.py::test_layers_take_turns_to_merge",
    ),
    Fault(
        "current token's decay left out",
        "deltalog_kernels/cpu.py",
        "sums = torch.cat([decay_ln[:, :, None], own.flip(2)], dim=2).cumsum(2)",
        "sums = torch.cat([decay_ln[:, :, None] * 0, own.flip(2)], dim=2).cumsum(2)",
    ),
    Fault(
        "log not copied with its page",
        "deltalog_kernels/vllm_plugin/models.py",
        "(conv, temporal, *[temporal] * len(logs))",
        "(conv, temporal)",
        f"{LIFE}::test_prefix_cache_hits_copy_the_log",
    ),
    Fault(
        "stale positions",
        "deltalog_kernels/vllm_plugin/metadata.py",
        "starts = ends - common.query_start_loc[: rows + 1].diff()",
        "starts = ends - common.query_start_loc[: rows + 1].diff() - 1",
        f"{LIFE}::test_deferred_equals_stock",
    ),
    Fault(
        "padding row that writes",
        "deltalog_kernels/cpu.py",
        "index = torch.nonzero(slot_ids > NULL_SLOT).flatten()",
        "index = torch.nonzero(slot_ids >= NULL_SLOT).flatten()",
    ),
    Fault(
        "merge that also appends",
        "deltalog_kernels/cpu.py",
        "    appending = ~merging\n    slots, live = rows.slots[appending], rows.live[appending]",
        "    appending = merging | ~merging if layout.capacity else ~merging\n"
        "    slots, live = rows.slots[appending], rows.live[appending].clamp(max=layout.capacity - 1)",
    ),
    Fault(
        "neutral entries that are not neutral",
        "deltalog_kernels/layout.py",
        "NEUTRAL = 0.0",
        "NEUTRAL = 1e-3",
    ),
    Fault(
        "decays summed as running totals",
        "deltalog_kernels/cpu.py",
        "decays, total = sums[:, :, :-1].flip(2).exp(), sums[:, :, -1].exp()",
        "decays, total = (sums[:, :, -1:] - own.cumsum(2)).exp(), sums[:, :, -1].exp()",
    ),
    Fault(
        "decay of an entry applied to itself",
        "deltalog_kernels/cpu.py",
        "sums[:, :, :-1].flip(2).exp(), sums",
        "sums[:, :, 1:].flip(2).exp(), sums",
    ),
    Fault(
        "key's norm left out of the logged update",
        "deltalog_kernels/cpu.py",
        "update = update * inverse_norm.repeat_interleave(layout.heads_ratio, 1)",
        "update = update * 1",
    ),
    Fault(
        "value heads mapped to the wrong key head",
        "deltalog_kernels/cpu.py",
        "q = q.repeat_interleave(layout.heads_ratio, 1)",
        "q = q.repeat(1, layout.heads_ratio, 1)",
    ),
    Fault(
        "RWKV6 reads after its decay",
        "deltalog_kernels/cpu.py",
        "log = _gather_log(memory, rows, torch.zeros_like(decay_ln))",
        "log = _gather_log(memory, rows, decay_ln)",
    ),
    Fault(
        "merges counted one step late",
        "deltalog_kernels/vllm_plugin/stats.py",
        "self._logs_by_live_length(step.starts[: step.decodes])",
        "self._logs_by_live_length(step.starts[: step.decodes] - 1)",
        "tests/plugin/test_counters.py::test_counters_equal_a_count_by_hand",
    ),
    Fault(
        "Triton: an entry aged by itself",
        "deltalog_kernels/kernels/replay.py",
        "tl.where(later > tl.arange(0, ENTRIES)[:, None], decays, 0.0)",
        "tl.where(later >= tl.arange(0, ENTRIES)[:, None], decays, 0.0)",
        f"{TRITON}::test_mixed_phases_equal_write_through",
    ),
    Fault(
        "Triton: one entry left out of the merge",
        "deltalog_kernels/kernels/replay.py",
        "for back in tl.static_range(M - 1):",
        "for back in tl.static_range(M - 2):",
        f"{TRITON}::test_mixed_phases_equal_write_through",
    ),
    Fault(
        "Triton: output of padding left as it was",
        "deltalog_kernels/kernels/rwkv6.py",
        "    for tile_index in range(TILES):\n            tl.store(out_ptr",
        "    for tile_index in range(0):\n            tl.store(out_ptr",
        f"{TRITON}::test_padding_rows_emit_zero_and_touch_nothing",
    ),
    Fault(
        "service: a wrong key is taken",
        "service/keys.py",
        "if hmac.compare_digest(digest, key.config.sha256):",
        "if not hmac.compare_digest(digest, key.config.sha256):",
        "tests/service/test_keys.py",
    ),
    Fault(
        "service: a key's tokens are not charged",
        "service/keys.py",
        "self._tokens.take(lease.tokens)",
        "self._tokens.take(0)",
        "tests/service/test_keys.py",
    ),
    Fault(
        "service: an endless body is read",
        "service/api/http.py",
        "_refuse_too_large(len(body) + len(chunk))",
        "_refuse_too_large(len(chunk))",
        "tests/service/test_http.py",
    ),
    Fault(
        "service: a deep body is taken",
        "service/api/http.py",
        "if depth > MAX_DEPTH:",
        "if depth > 100 * MAX_DEPTH:",
        "tests/service/test_http.py",
    ),
    Fault(
        "service: the first token waits for company",
        "service/engine/outbox.py",
        "        while True:\n            self._wanted = 1\n",
        "        while True:\n            self._wanted = self._most\n",
        "tests/service/test_outbox.py",
    ),
    Fault(
        "service: a stream that breaks ends like a whole one",
        "service/api/http.py",
        "elif isinstance(message, Answer):\n                yield",
        "elif isinstance(message, Answer) and False:\n                yield",
        "tests/service/test_http.py",
    ),
]

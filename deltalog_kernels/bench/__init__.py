"""Benchmarks: each checks its results before it times anything."""


class BenchError(RuntimeError):
    """What a benchmark cannot or will not do here; the message says why, and what helps."""

"""Benchmarks: each checks its results before it times anything."""

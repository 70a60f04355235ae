"""Benchmark of starts of workers: ``python -m benchmarks.warm_starts``."""

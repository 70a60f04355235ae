"""Benchmarks of the whole system and of its parts; their results are in ``results/`` and ``README.md``."""

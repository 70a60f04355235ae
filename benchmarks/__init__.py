"""Measurements of the whole system. ``python -m benchmarks.end_to_end`` prints them."""

"""Data benchmarks: how long values take from one task to another."""

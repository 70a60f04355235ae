"""Benchmark of latency targets: the experiments of the QoS paper, on one node."""

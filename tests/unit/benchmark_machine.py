"""Facts about a machine, for reports of benchmarks."""

MACHINE = {
    "cores": 2,
    "cpu": "x",
    "memory_gib": 4,
    "kernel": "6",
    "python": "3.11",
    "byte_code_cached": True,
    "load_1min_before": 0.0,
}

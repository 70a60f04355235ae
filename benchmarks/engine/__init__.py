"""Engine benchmark: the same workloads on our engine and its peers, in turn, on one machine."""

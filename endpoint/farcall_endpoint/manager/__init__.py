"""The manager: one per node; it starts workers, sends them tasks, and reports what happened to each."""

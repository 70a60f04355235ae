"""The manager: one per node; starts workers, hands them tasks, and knows what happened to each."""

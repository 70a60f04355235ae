"""Scale benchmark of the engine: one agent with up to 1,024 simulated managers of 128 workers."""

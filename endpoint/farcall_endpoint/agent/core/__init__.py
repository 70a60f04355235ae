"""Core of the agent: decisions without I/O."""

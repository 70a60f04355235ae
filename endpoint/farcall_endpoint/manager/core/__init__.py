"""Core of the manager: decisions without I/O."""

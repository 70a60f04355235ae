"""Core of the forwarder: maps events and time to actions. No I/O, no clock, no random numbers."""

"""What the forwarder decides: events and time in, actions out. No I/O, no clock, no randomness of its own."""

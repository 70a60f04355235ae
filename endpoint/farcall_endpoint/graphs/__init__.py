"""Graphs in the manager: which calls are ready, the values between them, and the end. No I/O, no clock."""

"""Probe of isolation: walks all system calls of the kernel from inside a task, watched from outside."""

"""The worker: runs one task at a time. User code runs only here; it imports as little as possible."""

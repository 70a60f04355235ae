"""The worker: runs one task at a time. The only place where user code runs; imports as little as it can."""

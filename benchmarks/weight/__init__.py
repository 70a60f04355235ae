"""Weight of a call, always beside the same old commits."""

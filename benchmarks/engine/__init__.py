"""The engine beside its peers: the same work, in turn, on the same machine."""

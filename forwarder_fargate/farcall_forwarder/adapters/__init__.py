"""Adapters of the forwarder: the ROUTER socket, authentication, the stores, wake-ups, HTTP."""

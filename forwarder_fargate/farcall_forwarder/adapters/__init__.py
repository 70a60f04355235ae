"""How the forwarder touches the world: the ROUTER socket, the stores, wake-ups, HTTP."""

"""Shell of the agent: sockets, files, clocks and processes around its core."""

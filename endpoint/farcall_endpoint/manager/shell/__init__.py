"""Shell of the manager: processes, sockets and files around its core."""

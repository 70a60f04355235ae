"""One agent, a thousand managers, 131,072 workers: how far the engine goes on one machine."""

"""One forwarder process with thousands of simulated endpoints: what a session and a task cost it."""

"""Forwarder benchmark: the cost of sessions and tasks for one process with thousands of simulated endpoints."""

"""Forwarder benchmark: one process with thousands of simulated endpoints."""

"""Simulation of a growing cloud tier: measured costs, limits of AWS, and models that use both."""

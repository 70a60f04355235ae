"""Preparation of environments on a node."""

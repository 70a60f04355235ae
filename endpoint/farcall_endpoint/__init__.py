"""Turns a machine into a Farcall endpoint: agent, managers and workers."""

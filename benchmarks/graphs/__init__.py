"""Graphs on one node: what an edge costs, beside Ray, Dask and functions behind HTTP."""

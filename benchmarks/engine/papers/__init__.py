"""Experiments of the papers on this engine, on one machine (HPDC 2020, section 5)."""

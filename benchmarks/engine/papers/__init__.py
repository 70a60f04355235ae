"""The experiments of the papers on this engine: the same shapes, on one machine (HPDC 2020, section 5)."""

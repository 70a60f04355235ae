"""Analytics on Farcall. So far: the model of an exchange and its planner, which is Locus (NSDI 2019, section 4) with
the prices and storages of 2026."""

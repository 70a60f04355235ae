"""Analytics on Farcall: sort, group and join of Parquet files by tasks, and the planner of their exchange, after Locus
(NSDI 2019, section 4). See :mod:`~farcall_analytics.jobs` and :mod:`~farcall_analytics.planner`."""

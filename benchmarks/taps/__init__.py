"""TaPS, the public suite of task benchmarks (eScience 2024), on Farcall and on its other executors."""

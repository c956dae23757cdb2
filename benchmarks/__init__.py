"""Benchmarks of stageline's performance claims, one file for each; `python -m benchmarks` runs them all."""

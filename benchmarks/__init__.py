"""Measurements of what stageline claims, one file per claim; `python -m benchmarks` takes them all."""

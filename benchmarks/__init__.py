"""Benchmarks of stageline's performance claims; `python -m benchmarks` runs them all.

`claims/` has a file for each. They are measured with `measuring/`, on `trainers/` and `wires/` of which one each is
stageline's; `shape/` measures the code itself.
"""

"""What can be told of rows and labels from what crosses a cut, and layers that make it less.

Imports `tree`. Read `dependence.py`, `decoders.py` and `label_leak.py`, then `defences.py`; `png.py` draws.
"""

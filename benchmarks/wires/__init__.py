"""Ways to carry tensors between two processes, behind the small Protocol in `wire.py`."""

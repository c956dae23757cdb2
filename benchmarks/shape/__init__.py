"""Measures the shape of the code: its size, its names, its tests, and how many files a microbatch and a heartbeat pass.

`make shape` prints the table; `make shape ROOT=/path/to/another/checkout` measures another commit with its own `.venv`.
"""

"""Outputs of layers while a run trains: written to the run's folder, read back, and probed.

May import `pipeline`, `workers/disk`, `workers/runs` and `workers/runtime`. Read `tap_files.py` first, then
`tap_writer.py` and `reading.py`; for probes `probe.py`.
"""

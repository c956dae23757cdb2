"""Records of what stages take and give, taps of layers, bad microbatches left out.

May import `pipeline`, `disk`, `runtime`, `checkpoint` and `runs`. Read `replay.py` first; for outputs of layers
`tapped_files.py`, `taps.py` and `reading.py`, then `probe.py`; `skipping.py` leaves microbatches out.
"""

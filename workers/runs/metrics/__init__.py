"""What a run has measured, in its folder: lines of JSON, who writes them, and who reads them while the run goes on.

May import `disk` and `pipeline`. Read `lines.py`, then `metrics_file.py`.
"""

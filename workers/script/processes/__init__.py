"""A script's run on this machine: broker and workers are forks of the script, made and watched by a launcher.

May import `arguments`, `display` and `calls`. Read `process_run.py` first.
"""

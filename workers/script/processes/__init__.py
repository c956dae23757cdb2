"""A script's run: broker and workers are forks of the script, made and watched by a launcher; or workers join remotely.

May import `arguments`, `display` and `calls`. Read `process_run.py` first.
"""

"""The commands on what a run has trained: its checkpoints, its weights, its predictions, probes on its layers.

May import every room below the commands. Read `checkpoint.py` first.
"""

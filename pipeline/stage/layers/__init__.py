"""What a stage computes with: its layers and their weights, memory that is its own, precision, random generators.

May import `tree` and `errors`. Read `layer.py` first, then `body.py`.
"""

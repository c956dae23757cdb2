"""What changes a stage's weights: its optimizer and learning rates, clipping, averages of weights.

May import `stage/layers`, `tree`, `errors` and `model_names`. Read `update.py` first.
"""

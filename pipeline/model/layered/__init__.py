"""Models as lists of layers: the known families, the user's `Layers`, and any other model, by torch.export.

May import `data/batch.py`, `stage/layers`, and the files of `pipeline` itself. Read `layers.py` and `families.py`; for
traced models `traced_layers.py`, then `export.py` and `pieces.py`.
"""

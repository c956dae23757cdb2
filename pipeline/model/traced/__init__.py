"""A model as a list of layers that torch.export has found: for a model that is of no family and that has no `Layers`.

May import `families`, `data/batch.py`, `stage/layers`, and the files of `pipeline` itself. Read `traced_layers.py`,
then `export.py` and `pieces.py`.
"""

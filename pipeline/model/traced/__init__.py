"""Models as lists of layers that torch.export finds, for a model that is of no known family and has no `Layers`.

May import `families`, `data/batch.py`, `stage/layers`, and the files of `pipeline` itself. Read `traced_layers.py`,
then `export.py` and `pieces.py`.
"""

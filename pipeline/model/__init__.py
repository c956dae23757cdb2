"""Cuts the model that a plan names into segments, makes stages of them, and finds what its patterns match there.

May import `plan`, `stage`, and the files of `pipeline` itself. Read `cut.py`, then `load.py`;
`stage_weights.py` and `tensor_files.py` read a stage's weights from files: its own tensors alone, in small pieces,
checked by name, shape and dtype before.
"""

"""The model that a plan names: cut into segments, made into stages, and searched for the names that patterns match.

May import `plan`, `stage`, and the files of `pipeline` itself. Read `cut.py`, then `load.py`. `stage_weights.py` and
`tensor_files.py` read a stage's weights from files: only the stage's own tensors, in small pieces, checked by name,
shape and dtype before.
"""

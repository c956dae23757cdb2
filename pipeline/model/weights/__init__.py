"""Reads a stage's weights from files: its own tensors alone, in small pieces, checked by name, shape and dtype before.

May import `families`, `plan`, `stage`, and the files of `pipeline` itself. Read `stage_weights.py`, then
`tensor_files.py`.
"""

"""The segments of a cut model, of which stages are made: their layers, what they share, and what their state is called.

May import `weights`, `traced`, `stage`, `schedule`, and the files of `pipeline` itself. Read `segment.py`, then
`ties.py`.
"""

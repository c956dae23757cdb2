"""The tables of a plan file as models: every key with its type, its default and its meaning.

May import `schedule`, `evaluation`, and the files of `pipeline` itself. Read `training.py` first, then `key_types.py`;
the other tables are written alike, and `models.py` puts them together. Needs pydantic, which takes long to import: what
is needed before a plan is read is elsewhere.
"""

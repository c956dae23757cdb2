"""The tables of a plan file as models: every key with its type, its default and its meaning.

May import `schedule`, `evaluation`, and the files of `pipeline` itself. Read `training.py` first, then `key_types.py`.
The other tables are written alike, and `models.py` puts them together. The package needs pydantic, whose import takes
long; code that is needed before a plan is read is elsewhere.
"""

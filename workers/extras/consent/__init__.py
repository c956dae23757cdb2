"""Consent of the owner of data: what a process may open and import, and a record of use.

May import the public interface of the core. Read `allow_file.py` first, then `guard.py`.
"""

"""Tools of the claims: rounds in turn, processes, servers, trips over a wire, and how a finding is told.

Read `rounds.py` first.
"""

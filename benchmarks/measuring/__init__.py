"""Tools that the claims are measured with: rounds in turn, processes, servers, trips over a wire, and how a finding is told.

Read `rounds.py` first.
"""

"""How a message travels, who holds it, and what is decided about a run.

May import `pipeline`, never `workers`. Read `codec/message.py` for the data path,
`coordinator/coordinator.py` for the decisions.
"""

"""Features and tools beside the core: what a run can do without.

Each folder is one of them. Rooms of the core do not depend on them for training, queues or recovery.
"""

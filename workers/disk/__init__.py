"""How anything is written to the disk: whole or not at all, behind the compute loop's back, tensors to the bit.

May import `pipeline`. Read `atomic_file.py` first.
"""

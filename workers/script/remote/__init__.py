"""A script's run whose workers are on other machines and join its broker: the script's objects go there by name.

May import all other rooms of `script`. Read `remote_run.py` first.
"""

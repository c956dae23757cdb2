"""Addresses and connections: binding a socket, talking to a Redis server.

May import `broker.errors`. Read the file you need.
"""

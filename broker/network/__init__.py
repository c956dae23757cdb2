"""Addresses and connections: binding a socket, closing connections that take too much, talking to a Redis server.

May import `broker.errors`. Read the file you need.
"""

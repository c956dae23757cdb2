"""What can be wrong with a Redis server, or with the connection to it."""

from stageline.broker.errors import BrokerError


class RedisAway(BrokerError):
    """A Redis server cannot be reached now, or the connection to it broke; it may come back."""


class RedisGarbled(RedisAway):
    """What came from a Redis server is no answer, or announces more than one can have: the bytes were damaged on their
    way, or it is another kind of server. The connection is closed."""


class RedisRefusal(BrokerError):
    """A Redis server did not carry out a command, and may do so later: it is full, or cannot write to its disk."""


class RedisKeyTaken(RedisRefusal):
    """A key of this run is of another type: another client replaced it. It may be deleted again."""


class RedisUnfit(BrokerError):
    """A Redis server cannot be used as it is: its settings, its version or its access rules must change."""

"""Chooses the channel for an address: Redis for redis://, rediss:// and unix://, ZeroMQ for everything else.

The transports are imported on use, since they take time to load.
"""

from stageline.broker.control.channel import ClientChannel, ServerChannel

REDIS = ("redis://", "rediss://", "unix://")


def open_client(url: str, *, keeps: bool = False) -> ClientChannel:
    """A connection to the broker at `url`. With `keeps`, messages sent before it is established wait for it.

    Raises `AddressUnusable`.
    """
    if url.startswith(REDIS):
        from stageline.broker.transports.redis.channel import RedisClientChannel

        return RedisClientChannel(url)
    from stageline.broker.transports.sockets.zeromq_channel import ZeroMQClientChannel

    return ZeroMQClientChannel(url, keeps=keeps)


def open_server(url: str) -> ServerChannel:
    """The channel of a broker that listens at `url`. Raises `EndpointTaken`, `RedisUnfit`, `RedisAway`."""
    if url.startswith(REDIS):
        from stageline.broker.transports.redis.channel import RedisServerChannel

        return RedisServerChannel(url)
    from stageline.broker.transports.sockets.zeromq_channel import ZeroMQServerChannel

    return ZeroMQServerChannel(url)

"""What one end of a queue asks of a Redis server at one time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stageline.broker.network.redis_connection import Unit


@dataclass(frozen=True, slots=True)
class Exchange:
    """What to ask of the server as a whole, and who hears the answers."""

    unit: Unit
    hear: Callable[[list[Any]], None]

"""What one end of a queue asks of a Redis server at one time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from ..redis_link import RedisRefusal, Unit


@dataclass(frozen=True, slots=True)
class Task:
    """What to ask of the server as a whole, and who hears the answers."""

    unit: Unit
    hear: Callable[[list[Any]], None]


def sound(answers: list[Any]) -> list[Any]:
    """The answers. Raises `RedisRefusal` if one of them is an error."""
    for answer in answers:
        if isinstance(answer, ResponseError):
            raise RedisRefusal(f"Redis refuses: {answer}")
    return answers

"""Whether a Redis server can carry a run: it has version 6.2 or newer, or is Valkey, and never evicts keys."""

import re
from collections.abc import Sequence

from .answers import RedisUnfit

OLDEST = (6, 2)  # knows XADD NOMKSTREAM and XTRIM MINID
INQUIRY = ((b"INFO", b"server"), (b"INFO", b"memory"), (b"INFO", b"persistence"))


def check_fitness(address: str, answers: Sequence[object]) -> tuple[str, ...]:
    """Warnings about the server at `address`, from its answers to `INQUIRY`. Raises `RedisUnfit`."""
    facts = _facts(address, answers)
    version = facts.get("redis_version", "unknown")
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < OLDEST:
        raise RedisUnfit(f"Redis at {address} is version {version}; queues need 6.2 or newer, or Valkey")
    policy = facts.get("maxmemory_policy", "unknown")
    if policy != "noeviction":
        raise RedisUnfit(
            f"Redis at {address} has maxmemory-policy {policy}: it would throw messages away when its memory is full. "
            "Set it to noeviction, in redis.conf or by CONFIG SET maxmemory-policy noeviction"
        )
    if facts.get("aof_enabled") != "1":
        return (
            f"Redis at {address} has no append-only file: what it holds is gone when it restarts, and is added again "
            "by the workers that still have it. Set appendonly to yes, in redis.conf or by CONFIG SET appendonly yes",
        )
    return ()


def _facts(address: str, answers: Sequence[object]) -> dict[str, str]:
    facts: dict[str, str] = {}
    for answer in answers:
        if not isinstance(answer, bytes):
            raise RedisUnfit(f"Redis at {address} does not answer INFO: {answer!r:.80}")
        facts |= dict(re.findall(r"^(\w+):(.*?)\r?$", answer.decode("utf-8", "replace"), re.MULTILINE))
    return facts

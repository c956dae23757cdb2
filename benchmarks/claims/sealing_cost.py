"""Claim: a sealed queue over Redis costs little more than one in the clear."""

from benchmarks.measuring import redis_server
from benchmarks.measuring.ciphers import CipherCost
from benchmarks.measuring.finding import BenchmarkResult
from benchmarks.trainers import ours
from benchmarks.wires.redis import open_wire
from benchmarks.wires.sealed import open_sealed_wire
from benchmarks.workload import WORKLOADS

CLEAR, SEALED = "in the clear", "sealed"

COST = CipherCost(
    "Redis",
    {CLEAR: open_wire, SEALED: open_sealed_wire},
    redis_server.running,
    {CLEAR: ours.train_over_redis, SEALED: ours.train_sealed},
    WORKLOADS,
)

ABOUT = """\
Two processes on one machine exchange float32 tensors of one size over the queues of stageline, through a Valkey server
on a unix socket, which keeps nothing on disk. Sealed is the same with AES-256-GCM at both ends, for messages and for
what the ends announce. The latency is half of a round trip; a stream goes in one direction. Steps per second are those
of two workers over such a server, each with a thread of torch. Figures are medians over the rounds; the two take turns,
and a ratio is the median of those within each round."""


def measure(rounds: int) -> BenchmarkResult:
    return COST.result("Sealed queues over Redis", ABOUT, "sealing", rounds)

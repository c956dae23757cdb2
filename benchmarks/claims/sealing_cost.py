"""Claim: a sealed queue over Redis costs little more than one in the clear."""

from benchmarks.measuring import redis_server
from benchmarks.measuring.ciphers import CipherCost
from benchmarks.measuring.finding import BenchmarkResult
from benchmarks.wires.redis import open_wire
from benchmarks.wires.sealed import open_sealed_wire
from benchmarks.workload import WORKLOADS

CLEAR, SEALED = "in the clear", "sealed"

COST = CipherCost(
    "Redis",
    {CLEAR: open_wire, SEALED: open_sealed_wire},
    redis_server.running,
    {
        CLEAR: lambda url: (f"queues.url={url}",),
        SEALED: lambda url: (f"queues.url={url}", "model.factory=sealed_workload.py:build"),
    },
    dict(zip(WORKLOADS, (0.8, 0.8, 3.0), strict=True)),
)

ABOUT = """\
Two processes on one machine exchange float32 tensors of one size over the queues of stageline, through a Valkey server
on a unix socket, which keeps nothing on disk. Sealed is the same with AES-256-GCM at both ends, for messages and for
what the ends announce. The latency is half of a round trip; a stream goes in one direction; the two take turns, figures
are medians over the rounds, and a ratio is the median of those within each round. Steps per second are those of two
workers over such a server, each with a thread of torch. Both runs are there at once and take turns: while one goes on
for 0.8 seconds, 3 for the largest, all processes of the other are stopped. Their ratios are those of each window of the
sealed run to the two in the clear around it: median, and quartiles."""


def measure(rounds: int) -> BenchmarkResult:
    return COST.result("Sealed queues over Redis", ABOUT, "sealing", rounds)

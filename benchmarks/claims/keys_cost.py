"""Claim: keys on the connections of queues take at most 5 % of the steps per second."""

from functools import partial

from benchmarks.claims.queue_speed import address
from benchmarks.measuring.ciphers import CipherCost
from benchmarks.measuring.finding import BenchmarkResult
from benchmarks.wires.keyed import open_keyed_wire
from benchmarks.wires.ours import open_wire
from benchmarks.workload import WORKLOADS, Workload

CLEAR, KEYED = "in the clear", "with keys"
LARGE = Workload(width=64, layers=1, sequence=16, rows=2**12, warm=1, timed=4)  # messages of 16 MB
OPEN = "queues.url=tcp://0.0.0.0:0"  # which has keys unless that is renounced

COST = CipherCost(
    "tcp",
    {CLEAR: open_wire, KEYED: open_keyed_wire},
    partial(address, "tcp"),
    {
        CLEAR: lambda url: (OPEN, "broker.insecure=true"),
        KEYED: lambda url: (OPEN,),
    },
    dict(zip((*WORKLOADS, LARGE), (0.8, 0.8, 3.0, 20.0), strict=True)),
)

ABOUT = """\
Two processes on one machine exchange float32 tensors of one size over the queues of stageline, over tcp. With keys, the
connections are ZeroMQ's with CURVE: XSalsa20 and Poly1305 in the thread that also sends, for messages over 1 MiB in
pieces. The latency is half of a round trip; a stream goes in one direction; the two take turns, figures are medians
over the rounds, and a ratio is the median of those within each round. Steps per second are those of two workers, each
with a thread of torch; the messages of the last workload have 16 MB. Both runs are there at once and take turns: while
one goes on for 0.8 seconds, 3 and 20 for the larger, all processes of the other are stopped. Their ratios are those of
each window with keys to the two in the clear around it: median, and quartiles."""


def measure(rounds: int) -> BenchmarkResult:
    return COST.result("Queues with keys over tcp", ABOUT, "keys", rounds)

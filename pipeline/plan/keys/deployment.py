"""The tables `queues`, `recovery`, `broker` and `workers.N`: what carries a run, and what follows the loss of a worker.

The docstrings of the tables are published in docs/plan.schema.json.
"""

import sys
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import Field

from stageline.pipeline import addresses

from .key_types import (
    Accepts,
    Bandwidth,
    CodecName,
    Codecs,
    Device,
    Seconds,
    Section,
    Size,
    Truth,
    Unset,
    WeightsPath,
    address,
    one_of,
    whole,
)
from .stages import MOST_STAGES

BadMicrobatch = Literal["halt", "skip"]
Recorded = Literal["none", "bad", "all"]
Padding = Literal["none", "padme"]

_MOST_THREADS = 1024  # a typing error shall not make a billion


class QueuesPlan(Section):
    """Transport of the messages, and the bytes of them that a producer retains."""

    url: Annotated[str, address(addresses.queue_schemes())] = Field(
        default="shm://" if sys.platform == "linux" else "ipc://",
        description="What carries the messages between workers.",
        examples=list(addresses.queue_schemes().values()),
    )
    retain_bytes: Size = Field(
        default=2**30,
        description="How much a producer keeps in memory to deliver again; four times as much may lie on disk.",
        examples=["256MiB"],
    )
    codec: Unset[Codecs] = Field(
        default=None,
        description="In how many bytes floating-point activations and gradients travel between stages: as they are, "
        "rounded to bfloat16, or as int8 with a scale for each row; for all queues, or by direction and queue. It is "
        "part of the result. Default: lossless.",
        examples=["bf16", {"forward": "int8", "backward": "bf16", "forward-2": "lossless"}],
    )

    padding: Annotated[Padding, one_of(get_args(Padding))] = Field(
        default="none",
        description="Whether sealed messages at a Redis server are made longer, by 12 % at most, so that their lengths "
        "tell less.",
        examples=["padme"],
    )

    def codec_of(self, direction: str, stage: int | None) -> CodecName:
        """Return the codec of the queue from which `stage` takes messages of `direction`.

        The most precise name wins: the queue ("forward-2"), then the direction ("forward"). Without either the codec is
        "lossless".

        Args:
            direction: "forward" or "backward".
            stage: Number of the stage that takes; None for a queue of which only the direction is known.
        """
        return self.codecs.get(f"{direction}-{stage}") or self.codecs.get(direction) or "lossless"

    @property
    def codecs(self) -> Mapping[str, CodecName]:
        """The codecs by direction ("forward") or queue ("forward-2"); those without a name are lossless."""
        match self.codec:
            case None:
                return {}
            case str(every):
                return dict.fromkeys(("forward", "backward"), every)
            case some:
                return some

    @property
    def lossy(self) -> bool:
        """True if some queue has a codec that loses bits."""
        return any(each != "lossless" for each in self.codecs.values())

    @property
    def in_one_process(self) -> bool:
        """True if the queues reach no other process, so that one process computes all stages."""
        return addresses.transport_of(self.url).reach is addresses.Reach.PROCESS


class RecoveryPlan(Section):
    """Settings by which the loss of a worker is noticed and repaired."""

    lease: Seconds = Field(
        default=10.0,
        description="How long (seconds) a worker may be silent before it counts as lost.",
        examples=["30s"],
    )
    action: Unset[Seconds] = Field(
        default=None,
        description="How long (seconds) one action, such as a microbatch's forward, may take before the worker counts "
        "as lost. Default: `lease`.",
        examples=["2min"],
    )
    loading: Seconds = Field(
        default=300.0,
        description="How long (seconds) loading model and data, and the trial of one microbatch, may take.",
        examples=["30min"],
    )
    snapshot_every: Annotated[int, whole(0)] = Field(
        default=20,
        description="Steps between snapshots; work redone after a loss is bounded by it. 0: none are written.",
        examples=[100],
    )
    copies: Unset[Annotated[int, whole(0, 1)]] = Field(
        default=None,
        description="How many workers besides its own hold each stage's snapshot on their disks, so that a worker may "
        "be lost with its disk. Workers that share one run folder copy nothing. Default: 0.",
        examples=[1],
    )
    copy_bandwidth: Unset[Bandwidth] = Field(
        default=None,
        description="What copies of snapshots may take of a worker's connection, in bytes a second. Activations and "
        "gradients go first in any case. Default: no limit.",
        examples=["1Gbit/s"],
    )
    restarts: Annotated[int, whole(0)] = Field(
        default=5,
        description="How many times in a row, without a newer complete checkpoint, a worker may be replaced before "
        "the run is given up. 0: losing a worker ends the run.",
        examples=[5],
    )
    on_bad_microbatch: Annotated[BadMicrobatch, one_of(get_args(BadMicrobatch))] = Field(
        default="halt",
        description="What happens when a microbatch's loss is not a finite number or the model raises: the run "
        "stops and names it, or the microbatch is left out.",
        examples=["skip"],
    )
    record: Annotated[Recorded, one_of(get_args(Recorded))] = Field(
        default="bad",
        description="What `stageline replay` can run again: nothing, the microbatch that stopped the run, or every "
        "microbatch since the last but one complete checkpoint.",
        examples=["all"],
    )

    @property
    def longest_action(self) -> float:
        """Longest time of one action, in seconds: `action`, or `lease` if the plan does not set it."""
        return self.lease if self.action is None else self.action

    @property
    def on(self) -> bool:
        """True if stages write snapshots and lost workers are replaced."""
        return self.restarts > 0 and self.snapshot_every > 0


class BrokerPlan(Section):
    """Address of the broker, and the place of its records."""

    url: Annotated[str, address(addresses.broker_schemes())] = Field(
        default="tcp://127.0.0.1:5600",
        description="Where `broker` listens, and where `worker` and `status` look for it. `train` takes a free "
        "address of its own.",
        examples=list(addresses.broker_schemes().values()),
    )
    store: Annotated[str, address(addresses.store_schemes(), "sqlite")] = Field(
        default="sqlite",
        description="Where the broker keeps its records: in a file of the run's folder, or at a Redis server.",
        examples=["redis://host:6379/0"],
    )
    insecure: Truth = Field(
        default=False,
        description="Whether a broker that other machines can reach, its workers and commands go without keys, so that "
        "anyone who reaches it can read and change the run. Give it on every machine.",
        examples=[True],
    )
    patience: Seconds = Field(
        default=600.0,
        description="How long (seconds) a script waits for its workers on other machines.",
        examples=["1h"],
    )

    @property
    def has_keys(self) -> bool:
        """True if the broker at `url`, and those who dial it, have keys."""
        return addresses.needs_keys(self.url, insecure=self.insecure)


class WorkerPlan(Section):
    """A worker: its stages, their device, and the threads that it computes with."""

    stages: Annotated[
        tuple[Annotated[int, whole(0, MOST_STAGES - 1)], ...],
        Field(min_length=1),
        Accepts("a list of stages such as [0, 2]"),
    ] = Field(
        description="The stages that the worker owns; several for an interleaved or a U-shaped placement.",
        examples=[[0, 2]],
    )
    device: Device = Field(default="cpu", description="Where the stages live.", examples=["cuda:0"])
    threads: Annotated[int, whole(1, _MOST_THREADS)] = Field(
        default=1, description="Threads that torch computes with. It is part of the result.", examples=[4]
    )
    weights: Unset[WeightsPath] = Field(
        default=None,
        description="Where this worker reads the weights of its stages. Default: `model.weights`.",
        examples=["/data/part-1.safetensors"],
    )
    memory: Unset[Size] = Field(
        default=None,
        description="What the process of this worker may take beyond its program, in bytes. Default: `memory.limit`.",
        examples=["2GiB"],
    )

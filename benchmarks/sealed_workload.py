"""The benchmark's model, whose workers seal their queues over Redis with secrets made of the run's."""

from typing import Any

from torch import nn

from benchmarks.wires.sealed import sealing
from benchmarks.workload import build as build_model
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.secrets import QueueSecrets
from stageline.workers.process import open_queues


def sealed_options(**options: Any) -> QueueOptions:
    keys = options.pop("secrets").requests
    secrets = QueueSecrets(keys, sealing_of=lambda queue: sealing(queue, keys[queue.name]))
    return QueueOptions(**options, secrets=secrets)


def build(width: int, layers: int) -> nn.Sequential:
    """The same model. From here on this process seals what it leaves with a server."""
    open_queues.QueueOptions = sealed_options  # type: ignore[attr-defined, misc, assignment]
    return build_model(width, layers)

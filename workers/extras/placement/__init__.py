"""On which machines a model's stages go, and where it is cut for them.

May import `schedule`, `plan` and `errors`. Read `hosts.py`, what the machines have; then `chain.py`, which finds the
stages, and `fit.py`, which chooses among them by simulated time.
"""

from stageline.workers.extras.fitting.chain import LayerTimes
from stageline.workers.extras.fitting.fit import ComparedWay, HostFit, HostFitStage, NoFit, fit
from stageline.workers.extras.fitting.hosts import Hosts, read_hosts

__all__ = ["ComparedWay", "HostFit", "HostFitStage", "Hosts", "LayerTimes", "NoFit", "fit", "read_hosts"]

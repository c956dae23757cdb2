"""The plan of a run: one frozen value, read from TOML, validated once, the same for every process of the run."""

from .difference import Difference, differences
from .refusal import PlanError, PlanRefused
from .settings import from_mapping, read_plan
from .value import (
    BrokerPlan,
    DataPlan,
    LrSchedulerPlan,
    ModelPlan,
    OptimizerPlan,
    Plan,
    QueuesPlan,
    RecoveryPlan,
    RunPlan,
    SchedulePlan,
    WorkerPlan,
)

__all__ = [
    "BrokerPlan",
    "DataPlan",
    "Difference",
    "LrSchedulerPlan",
    "ModelPlan",
    "OptimizerPlan",
    "Plan",
    "PlanError",
    "PlanRefused",
    "QueuesPlan",
    "RecoveryPlan",
    "RunPlan",
    "SchedulePlan",
    "WorkerPlan",
    "differences",
    "from_mapping",
    "read_plan",
]

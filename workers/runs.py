"""Names runs and the files in their folders."""

import secrets
from datetime import datetime
from pathlib import Path

from pipeline.plan import Plan

STORE = "broker.sqlite"
RESULT = "result.json"
PLAN = "plan.json"


def new_id(plan: Plan) -> str:
    """A name that no other run has, and that sorts by time: digits-20260131-235959-1f0c."""
    return f"{plan.run.name}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def folder(plan: Plan, run: str) -> Path:
    """Where a run leaves its files: weights, logs, the broker's records, the result."""
    return plan.run.dir / run

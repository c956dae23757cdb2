"""Where the plan says that the broker's records are."""

from pathlib import Path

import pytest

from pipeline.plan import read
from redis_server import shared_server
from workers.runs import NoSuchRun
from workers.stores import demand_records, open_store


def test_a_run_whose_server_has_lost_its_records_is_not_begun_anew_by_a_resume(tmp_path: Path) -> None:
    url = shared_server().own_database()
    plan = read("examples/mlp", sets=[f"broker.store={url}", f"run.dir={tmp_path}"], environment={})
    with pytest.raises(NoSuchRun, match="has no records of run mlp-1; was it emptied"):
        demand_records(plan, "mlp-1")
    store = open_store(plan, "mlp-1")
    store.put("run", {"id": "mlp-1", "plan": "d"})
    store.close()
    demand_records(plan, "mlp-1")

"""Prometheus' own tool reads the files in docker/monitoring, and tries their alerts on series that are made up."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from support.monitoring import EXPRESSIONS, MONITORING
from support.paths import ROOT

pytestmark = pytest.mark.engines

PROMTOOL = shutil.which("promtool") or str(ROOT / "build/promtool/usr/bin/promtool")  # of `make promtool`

LABELS = {"run_phase": ', phase="running"', "worker_losses_total": ', worker="1"', "worker_up": ', worker="1"'}


def series(instance: str, **values: str) -> list[dict[str, str]]:
    """The series of one run, by the names of its measures without `stageline_`."""
    names = {name: name if name == "up" else f"stageline_{name}" for name in values}
    return [
        {"series": f'{names[name]}{{instance="{instance}", job="stageline"{LABELS.get(name, "")}}}', "values": each}
        for name, each in values.items()
    ]


def firing(at: str, by: str, *expected: str, alert: str = "") -> dict[str, object]:
    """The alerts that fire at a time, counted by labels; of one name alone if `alert` has it."""
    only = f', alertname="{alert}"' if alert else ""
    samples = [{"labels": f"{{{labels}}}", "value": 1} for labels in expected]
    return {
        "expr": f'count by ({by}) (ALERTS{{alertstate="firing"{only}}})',
        "eval_time": at,
        "exp_samples": samples,
    }


LATE = ("StagelineStalled", "StagelineSlow", "StagelineWorkerMissing", "StagelineDiskNearlyFull")
TESTS = [
    {
        "interval": "1m",
        "input_series": series(
            "a",
            run_phase="1x30",
            last_step_age_seconds="1x10 60+60x20",
            step_seconds_sum="0+60x10 600x20",
            step_seconds_count="0+60x10 600x20",
            steps_total="0+60x10 600x20",
            best_steps_per_second="1x30",
            worker_losses_total="0x10 1x20",
            worker_up="1x10 0x20",
            disk_free_bytes="50x10 5x20",
            disk_size_bytes="100x30",
        ),
        "alert_rule_test": [
            {"eval_time": "9m", "alertname": name, "exp_alerts": []}
            for name in ("StagelineStalled", "StagelineWorkerLost", "StagelineSlow")
        ],
        "promql_expr_test": [
            firing("30m", "alertname", *(f'alertname="{name}"' for name in LATE)),
            firing("9m", "alertname"),
            firing(
                "13m",
                "alertname, worker",
                'alertname="StagelineWorkerLost", worker="1"',
                alert="StagelineWorkerLost",
            ),
        ],
    },
    {
        "name": "a run that hangs for longer than an hour, and one that hangs before its first step",
        "interval": "1m",
        "input_series": [
            *series("a", run_phase="1x90", last_step_age_seconds="1x10 60+60x80", best_steps_per_second="1x90"),
            *series("b", last_step_age_seconds="0+60x90"),
            *series("slow", last_step_age_seconds="300x90", best_steps_per_second="0.005x90"),
        ],
        "promql_expr_test": [
            firing("20m", "instance", 'instance="a"', alert="StagelineStalled"),
            firing("89m", "instance", 'instance="a"', 'instance="b"', alert="StagelineStalled"),
        ],
    },
    {
        "name": "a pause of eighty minutes, a run that takes no checkpoint, and one that has no snapshots",
        "interval": "1m",
        "input_series": [
            *series(
                "a",
                run_phase="1x90",
                run_paused="0x10 1x80",
                run_start_timestamp_seconds="0x90",
                checkpoint_step="7x90",
                checkpoint_timestamp_seconds="300x90",
                steps_total="0+60x10 600x80",
                best_steps_per_second="1x90",
            ),
            *series(
                "never", run_phase="1x90", run_paused="0x90", run_start_timestamp_seconds="0x90", checkpoint_step="0x90"
            ),
            *series(
                "resumed",
                run_phase="1x90",
                run_start_timestamp_seconds="4000x90",
                checkpoint_step="9x90",
                checkpoint_timestamp_seconds="-9000x90",
            ),
            *series("bare", run_phase="1x90", run_start_timestamp_seconds="0x90"),
        ],
        "promql_expr_test": [
            firing("89m", "alertname, instance", 'alertname="StagelineNoCheckpoint", instance="never"'),
        ],
    },
    {
        "name": "an endpoint that is gone in a run, one that was gone before, and one of a run that has finished",
        "interval": "1m",
        "input_series": [
            *series("a", up="1x10 0x20", run_phase="1x10"),
            *series("b", up="0x30"),
            *series("finished", up="1x10 0x20", run_phase="1x9 0"),  # the last scrape has told so
        ],
        "promql_expr_test": [
            firing("13m", "alertname, instance", 'alertname="StagelineEndpointDown", instance="a"'),
        ],
    },
]


def test_prometheus_reads_the_files_and_its_alerts_go_off_when_they_should(tmp_path: Path) -> None:
    for file in MONITORING.glob("*.yml"):
        shutil.copy(file, tmp_path)
    asked = [each.replace("$instance", "a") for each in EXPRESSIONS.values()]
    recorded = [{"record": f"series_{place}", "expr": each} for place, each in enumerate(asked)]
    (tmp_path / "shown.yml").write_text(yaml.safe_dump({"groups": [{"name": "shown", "rules": recorded}]}))
    tests = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": TESTS}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(tests))
    for words in (
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "shown.yml"],
        ["test", "rules", "tests.yml"],
    ):
        done = subprocess.run([PROMTOOL, *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

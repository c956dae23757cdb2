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

SERIES = """
rule_files: [alerts.yml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'stageline_run_phase{instance="a", job="stageline", phase="running"}', values: '1x30'}
      - {series: 'stageline_last_step_age_seconds{instance="a", job="stageline"}', values: '1x10 60+60x20'}
      - {series: 'stageline_step_seconds_sum{instance="a", job="stageline"}', values: '0+60x10 600x20'}
      - {series: 'stageline_step_seconds_count{instance="a", job="stageline"}', values: '0+60x10 600x20'}
      - {series: 'stageline_steps_total{instance="a", job="stageline"}', values: '0+60x10 600x20'}
      - {series: 'stageline_best_steps_per_second{instance="a", job="stageline"}', values: '1x30'}
      - {series: 'stageline_worker_losses_total{instance="a", job="stageline", worker="1"}', values: '0x10 1x20'}
      - {series: 'stageline_worker_up{instance="a", job="stageline", worker="1"}', values: '1x10 0x20'}
      - {series: 'stageline_disk_free_bytes{instance="a", job="stageline"}', values: '50x10 5x20'}
      - {series: 'stageline_disk_size_bytes{instance="a", job="stageline"}', values: '100x30'}
    alert_rule_test:
      - {eval_time: 9m, alertname: StagelineStalled, exp_alerts: []}
      - {eval_time: 9m, alertname: StagelineWorkerLost, exp_alerts: []}
      - {eval_time: 9m, alertname: StagelineSlow, exp_alerts: []}
    promql_expr_test:
      - expr: count by (alertname) (ALERTS{alertstate="firing"})
        eval_time: 30m
        exp_samples:
          - {labels: '{alertname="StagelineStalled"}', value: 1}
          - {labels: '{alertname="StagelineSlow"}', value: 1}
          - {labels: '{alertname="StagelineWorkerMissing"}', value: 1}
          - {labels: '{alertname="StagelineDiskNearlyFull"}', value: 1}
      - expr: count by (alertname) (ALERTS{alertstate="firing"})
        eval_time: 9m
        exp_samples: []
      - expr: count by (alertname, worker) (ALERTS{alertstate="firing", alertname="StagelineWorkerLost"})
        eval_time: 13m
        exp_samples: [{labels: '{alertname="StagelineWorkerLost", worker="1"}', value: 1}]
"""


HOURS = """
rule_files: [alerts.yml]
evaluation_interval: 1m
tests:
  - name: a run that hangs for longer than an hour, and one that hangs before its first step
    interval: 1m
    input_series:
      - {series: 'stageline_run_phase{instance="a", job="stageline", phase="running"}', values: '1x90'}
      - {series: 'stageline_last_step_age_seconds{instance="a", job="stageline"}', values: '1x10 60+60x80'}
      - {series: 'stageline_best_steps_per_second{instance="a", job="stageline"}', values: '1x90'}
      - {series: 'stageline_last_step_age_seconds{instance="b", job="stageline"}', values: '0+60x90'}
      - {series: 'stageline_last_step_age_seconds{instance="slow", job="stageline"}', values: '300x90'}
      - {series: 'stageline_best_steps_per_second{instance="slow", job="stageline"}', values: '0.005x90'}
    promql_expr_test:
      - expr: count by (instance) (ALERTS{alertstate="firing", alertname="StagelineStalled"})
        eval_time: 20m
        exp_samples: [{labels: '{instance="a"}', value: 1}]
      - expr: count by (instance) (ALERTS{alertstate="firing", alertname="StagelineStalled"})
        eval_time: 89m
        exp_samples: [{labels: '{instance="a"}', value: 1}, {labels: '{instance="b"}', value: 1}]
  - name: a pause of eighty minutes, a run that takes no checkpoint, and one that has no snapshots
    interval: 1m
    input_series:
      - {series: 'stageline_run_phase{instance="a", job="stageline", phase="running"}', values: '1x90'}
      - {series: 'stageline_run_paused{instance="a", job="stageline"}', values: '0x10 1x80'}
      - {series: 'stageline_run_start_timestamp_seconds{instance="a", job="stageline"}', values: '0x90'}
      - {series: 'stageline_checkpoint_step{instance="a", job="stageline"}', values: '7x90'}
      - {series: 'stageline_checkpoint_timestamp_seconds{instance="a", job="stageline"}', values: '300x90'}
      - {series: 'stageline_steps_total{instance="a", job="stageline"}', values: '0+60x10 600x80'}
      - {series: 'stageline_best_steps_per_second{instance="a", job="stageline"}', values: '1x90'}
      - {series: 'stageline_run_phase{instance="never", job="stageline", phase="running"}', values: '1x90'}
      - {series: 'stageline_run_paused{instance="never", job="stageline"}', values: '0x90'}
      - {series: 'stageline_run_start_timestamp_seconds{instance="never", job="stageline"}', values: '0x90'}
      - {series: 'stageline_checkpoint_step{instance="never", job="stageline"}', values: '0x90'}
      - {series: 'stageline_run_phase{instance="resumed", job="stageline", phase="running"}', values: '1x90'}
      - {series: 'stageline_run_start_timestamp_seconds{instance="resumed", job="stageline"}', values: '4000x90'}
      - {series: 'stageline_checkpoint_step{instance="resumed", job="stageline"}', values: '9x90'}
      - {series: 'stageline_checkpoint_timestamp_seconds{instance="resumed", job="stageline"}', values: '-9000x90'}
      - {series: 'stageline_run_phase{instance="bare", job="stageline", phase="running"}', values: '1x90'}
      - {series: 'stageline_run_start_timestamp_seconds{instance="bare", job="stageline"}', values: '0x90'}
    promql_expr_test:
      - expr: count by (alertname, instance) (ALERTS{alertstate="firing"})
        eval_time: 89m
        exp_samples: [{labels: '{alertname="StagelineNoCheckpoint", instance="never"}', value: 1}]
  - name: an endpoint that is gone in a run, and one that was gone before
    interval: 1m
    input_series:
      - {series: 'up{instance="a", job="stageline"}', values: '1x10 0x20'}
      - {series: 'stageline_run_phase{instance="a", job="stageline", phase="running"}', values: '1x10'}
      - {series: 'up{instance="b", job="stageline"}', values: '0x30'}
    promql_expr_test:
      - expr: count by (alertname, instance) (ALERTS{alertstate="firing"})
        eval_time: 13m
        exp_samples: [{labels: '{alertname="StagelineEndpointDown", instance="a"}', value: 1}]
"""


def test_prometheus_reads_the_files_and_its_alerts_go_off_when_they_should(tmp_path: Path) -> None:
    for file in MONITORING.glob("*.yml"):
        shutil.copy(file, tmp_path)
    asked = [each.replace("$instance", "a") for each in EXPRESSIONS.values()]
    recorded = [{"record": f"series_{place}", "expr": each} for place, each in enumerate(asked)]
    (tmp_path / "shown.yml").write_text(yaml.safe_dump({"groups": [{"name": "shown", "rules": recorded}]}))
    (tmp_path / "tests.yml").write_text(SERIES)
    (tmp_path / "hours.yml").write_text(HOURS)
    for words in (
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "shown.yml"],
        ["test", "rules", "tests.yml"],
        ["test", "rules", "hours.yml"],
    ):
        done = subprocess.run([PROMTOOL, *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

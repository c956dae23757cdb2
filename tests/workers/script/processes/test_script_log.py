"""Where a script's process logs."""

from pathlib import Path

import pytest
import structlog

from stageline.workers.script.processes.process_run import NAME, script_log


@pytest.fixture(autouse=True)
def unconfigured() -> None:
    structlog.reset_defaults()


def test_events_go_to_the_runs_folder_and_not_to_the_scripts_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with script_log(tmp_path):
        structlog.get_logger().info("standing by", reason="all places are taken")
    assert "all places are taken" in (tmp_path / NAME).read_text()
    assert capsys.readouterr().out == ""
    assert not structlog.is_configured()


def test_a_script_that_has_configured_structlog_keeps_its_own(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs, script_log(tmp_path):
        structlog.get_logger().info("standing by")
    assert logs
    assert not (tmp_path / NAME).exists()

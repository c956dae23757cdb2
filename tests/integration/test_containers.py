"""Files, commands, options and keys that docker/ names exist. `make docker-test` runs the containers themselves."""

import ast
import itertools
import json
import os
import re
import runpy
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from stageline.pipeline.plan import read_plan
from stageline.workers.cli.app import stageline
from stageline.workers.keys.key_file import new_pair
from support.paths import DOCS, EXAMPLES, ROOT

DOCKER = ROOT / "docker"
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def services(file: str = "compose.yaml") -> dict[str, dict[str, Any]]:
    """The services of a compose file, as with none of its variables set."""
    text = VARIABLE.sub(lambda found: found[2], (DOCKER / file).read_text())
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return found


def of_stageline() -> dict[str, dict[str, Any]]:
    return {name: service for name, service in services().items() if service.get("image") == "stageline"}


def workers() -> dict[str, dict[str, Any]]:
    return {name: service for name, service in of_stageline().items() if service["command"].startswith("worker ")}


def option(service: dict[str, Any], name: str) -> str:
    words = shlex.split(service["command"])
    return words[words.index(name) + 1]


def instructions(kind: str) -> list[str]:
    """Words after `kind` in docker/Dockerfile, without files of another stage of the build."""
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    return [line.removeprefix(f"{kind} ") for line in lines if line.startswith(f"{kind} ") and "--from=" not in line]


def sent_to_the_engine() -> list[str]:
    return [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]


def test_every_file_that_the_image_takes_exists_and_is_sent_to_the_engine() -> None:
    sent = sent_to_the_engine()
    assert [path for path in sent if not (ROOT / path).exists()] == []
    copied = {path for line in instructions("COPY") for path in line.split()[:-1]} - {"."}
    assert copied
    assert copied <= set(sent)


def test_the_folders_of_the_package_are_sent_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", lambda **words: given.update(words))
    runpy.run_path(str(ROOT / "setup.py"))
    folders = {Path(folder).parts[0] for folder in given["package_dir"].values()}
    linked = {path.resolve().name for path in (ROOT / "src" / "stageline").iterdir() if path.is_symlink()}
    assert linked
    assert {"setup.py", "pyproject.toml", *folders, *linked} <= set(sent_to_the_engine())
    required = runpy.run_path(str(DOCKER / "requirements.py"))["required"](ROOT / "setup.py", ["examples"])
    assert required == [*given["install_requires"], *given["extras_require"]["examples"]]


@pytest.mark.slow
def test_every_package_that_the_code_needs_is_in_an_image_without_extras() -> None:
    """numpy is imported nowhere at the top of a file: torch does that where a tensor lends its memory.

    IPython is there where a notebook runs, which is not in an image. The extras `dashboard` and `top` are imported by
    these commands alone.
    """
    required = runpy.run_path(str(DOCKER / "requirements.py"))["required"]
    names, with_extras = (
        {re.split(r"[\[>]", line)[0] for line in required(ROOT / "setup.py", extras)}
        for extras in ([], ["dashboard", "top"])
    )
    others = {"zmq": "pyzmq", "zlib_ng": "zlib-ng", "pydantic_core": "pydantic", "hiredis": "redis"}
    needed = {others.get(name, name) for part in ("pipeline", "broker", "workers") for name in imported(ROOT / part)}
    assert names >= needed - (with_extras - names) - {"stageline", "IPython"} | {"numpy"}


def imported(folder: Path) -> set[str]:
    """The packages that files in `folder` import, without those of the standard library."""
    trees = [ast.walk(ast.parse(path.read_text())) for path in folder.rglob("*.py")]
    found = {
        name
        for node in itertools.chain(*trees)
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    return {name.partition(".")[0] for name in found} - sys.stdlib_module_names


def test_each_service_is_a_command_of_stageline_with_options_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES / "digits")  # it is mounted where the commands run
    assert set(of_stageline()) == {"broker", *workers()}
    for service in of_stageline().values():
        with click.Context(stageline) as above:
            name, command, words = stageline.resolve_command(above, shlex.split(service["command"]))
            assert name is not None
            assert command is not None
            command.make_context(name, words, parent=above)


def test_what_the_containers_set_is_a_plan_with_a_worker_for_each_service(monkeypatch: pytest.MonkeyPatch) -> None:
    image = dict(line.split("=", 1) for line in instructions("ENV") if line.startswith("STAGELINE_"))
    assert image
    for name, service in workers().items():
        environment = {**image, **service["environment"]}
        plan = read_plan(EXAMPLES / "digits" / shlex.split(service["command"])[1], environment=environment)
        assert plan.origins["run.dir"] == plan.origins["broker.url"] == plan.origins["queues.url"]
        assert len(plan.placement) == len(workers())
        assert service["hostname"] == option(service, "--name") == name
    assert sorted(int(option(service, "--index")) for service in workers().values()) == list(range(len(workers())))


def test_only_the_broker_has_its_key_and_each_stage_has_only_the_line() -> None:
    text = VARIABLE.sub(lambda found: found[2], (DOCKER / "compose.yaml").read_text())
    files = {name: Path(each["file"]).name for name, each in yaml.safe_load(text)["secrets"].items()}
    given = {
        name: [(files[each["source"]], each["target"]) for each in service["secrets"]]
        for name, service in of_stageline().items()
    }
    assert given == {"broker": [("broker.key", "key")]} | {name: [("join.txt", "line")] for name in workers()}
    assert {option(each, "--join") for each in workers().values()} == {"@/run/secrets/line"}
    broker = services()["broker"]
    assert Path(broker["environment"]["STAGELINE_KEY_FILE"]).parent == Path(broker["tmpfs"])
    assert not any("INSECURE" in name for each in of_stageline().values() for name in each["environment"])
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "/docker/secrets/" in ignored


@pytest.mark.parametrize("mode", [0o400, 0o444, 0o644])
def test_a_key_is_copied_for_its_user_alone_whatever_mode_the_engine_gives_it(tmp_path: Path, mode: int) -> None:
    """A key file that others may read is refused, and engines make secrets with mode 0444 or 0644."""
    start = tmp_path / "entrypoint"
    start.write_text((DOCKER / "entrypoint").read_text().replace("/run/secrets", str(tmp_path / "secrets")))
    (tmp_path / "secrets").mkdir()
    pair = new_pair(tmp_path / "secrets" / "key")
    (tmp_path / "secrets" / "key").chmod(mode)
    copy = tmp_path / "keys" / "own.key"
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "STAGELINE_KEY_FILE": str(copy)}
    done = subprocess.run(["sh", str(start), "keys", "show"], env=environment, capture_output=True, text=True)
    assert pair.public.text in done.stdout, done.stderr
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    (tmp_path / "secrets" / "key").unlink()
    assert subprocess.run(["sh", str(start), "keys", "show"], env=environment, capture_output=True).returncode == 0


def test_the_image_starts_by_the_entrypoint_that_it_copies() -> None:
    (copied,) = [line for line in instructions("COPY") if "entrypoint" in line]
    source, folder = copied.split()
    (entry,) = instructions("ENTRYPOINT")
    assert json.loads(entry) == [f"{folder}{Path(source).name}"]
    assert os.access(ROOT / source, os.X_OK)


def test_the_test_changes_services_that_there_are() -> None:
    assert services("test/compose.yaml").keys() <= services().keys()
    for service in services("test/compose.yaml").values():
        context = DOCKER / service["build"]["context"]
        assert (context / service["build"]["dockerfile"]).exists()


def test_the_page_on_containers_has_every_variable_with_its_default() -> None:
    page = (DOCS / "guides/containers.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", page, re.MULTILINE))
    used = dict(VARIABLE.findall((DOCKER / "compose.yaml").read_text()))
    assert table.keys() == used.keys()
    shown = {name: default.strip("`") for name, default in table.items() if default.startswith("`")}
    assert {name: Path(used[name]).name if name == "STAGELINE_JOB" else used[name] for name in shown} == {
        name: Path(default).name if name == "STAGELINE_JOB" else default for name, default in shown.items()
    }

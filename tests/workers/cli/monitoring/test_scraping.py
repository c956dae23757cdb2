"""The endpoint of --metrics: what Prometheus reads there, over HTTP, is what the run's broker answers."""

import http.client
import json
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stageline.broker.control.messages import Ask
from stageline.pipeline.errors import ExitCode
from stageline.workers.cli.monitoring import measured, scraping
from stageline.workers.cli.monitoring.measured import AskBroker, asked_here
from stageline.workers.cli.monitoring.scraping import LAST, ScrapeEndpoint, Scrapes
from stageline.workers.control.questions import Questions
from stageline.workers.runs.series import families
from support.conversation import Conversation, name, report
from support.measured import measures
from support.workspace import Workspace, until, wait_for

FACTS: Mapping[str, Any] = msgspec.to_builtins(measures())
HERE = ("127.0.0.1", 0)
Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def got(url: str, method: str = "GET", accept: str = "*/*") -> tuple[int, str, str]:
    """Status, kind of content, and text of an answer."""
    with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)) as connection:
        connection.request(method, urlsplit(url).path, headers={"Accept": accept})
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()


def scraped(url: str) -> Values:
    """All values by name and labels, as prometheus_client's parser reads them."""
    status, kind, text = got(url)
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(each.name, tuple(sorted(each.labels.items()))): each.value for each in found}


def told(what: str) -> Mapping[str, Any]:
    assert what == "measures"
    return FACTS


@contextmanager
def endpoint(folder: Path, ask: AskBroker = told) -> Iterator[str]:
    with ScrapeEndpoint(HERE) as opened, opened.serving(folder, ask):
        yield opened.url


def test_every_series_of_a_run_is_served_with_its_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with endpoint(tmp_path) as url:
        found = scraped(url)
    assert url in capsys.readouterr().err
    assert found["stageline_queue_put_messages_total", (("queue", "forward-1"),)] == 501
    idle = (("cause", "message"), ("stage", "1.0"), ("worker", "1"))
    assert found["stageline_stage_idle_seconds_total", idle] == 400.5
    assert found["stageline_step_seconds_bucket", (("le", "1.0"),)] == 3
    assert (found["stageline_step_seconds_count", ()], found["stageline_step_seconds_sum", ()]) == (4, 42.5)
    assert 0 < found["stageline_disk_free_bytes", ()] <= found["stageline_disk_size_bytes", ()]
    served = {name for name, _ in found}
    for family in families(measures()):
        shown = f"{family.shown}_bucket" if family.buckets else family.shown
        assert shown in served


def test_openmetrics_is_served_to_who_asks_for_it(tmp_path: Path):
    with endpoint(tmp_path) as url:
        status, kind, text = got(url, accept="application/openmetrics-text; version=1.0.0")
    assert (status, kind.partition(";")[0]) == (200, "application/openmetrics-text")
    assert text.endswith("# EOF\n")


def test_a_broker_that_does_not_answer_is_down_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measured, "FRESH", 0.0)
    answers = [None, FACTS]
    with endpoint(tmp_path, lambda what: answers.pop(0)) as url:
        first, second = scraped(url), scraped(url)
    assert (first["stageline_broker_up", ()], second["stageline_broker_up", ()]) == (0.0, 1.0)
    assert ("stageline_steps_total", ()) not in first
    assert second["stageline_steps_total", ()] == 102


def test_many_scrapes_ask_the_broker_once_in_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measured, "FRESH", 3600.0)
    asked: list[str] = []
    with endpoint(tmp_path, lambda what: asked.append(what) or FACTS) as url:
        for _ in range(4):
            scraped(url)
    assert len(asked) == 1


def test_clients_that_send_nothing_keep_no_scrape_out_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scraping, "READS", 0.2)
    with endpoint(tmp_path) as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        silent = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(3 * scraping.MOST)]

        wait_for(lambda: answers(url))
        for each in silent:
            each.close()


def test_clients_that_send_slowly_keep_no_scrape_out_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A byte now and then is no silence: the whole request has a deadline as well."""
    monkeypatch.setattr(scraping, "READS", 3600.0)
    monkeypatch.setattr(scraping, "WHOLE", 0.2)
    with endpoint(tmp_path) as url:
        slow = [begun(url) for _ in range(scraping.MOST)]
        for each in slow:
            with closing(each):
                assert not rest(each)
        monkeypatch.setattr(scraping, "WHOLE", 3600.0)
        wait_for(lambda: answers(url))


def answers(url: str) -> bool:
    try:
        return bool(scraped(url))
    except (http.client.HTTPException, ConnectionError):  # refused: all threads wait for clients
        return False


def begun(url: str) -> socket.socket:
    """A connection with the beginning of a request."""
    opened = socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), 30)
    opened.sendall(b"GET /metrics HTTP/1.1\r\nAccept: ")
    return opened


def rest(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1)
    except ConnectionError:
        return b""


def test_a_connection_before_and_after_a_run_is_closed_at_once(tmp_path: Path):
    with ScrapeEndpoint(HERE) as opened:
        with closing(begun(opened.url)) as early:
            assert not rest(early)
        with opened.serving(tmp_path, told):
            assert scraped(opened.url)
        with closing(begun(opened.url)) as late:
            assert not rest(late)


def test_the_end_of_a_run_is_scraped_before_its_endpoint_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The alert that an endpoint is gone went off for minutes after each run that had ended well."""
    found: list[Values] = []
    with ScrapeEndpoint(HERE) as opened:
        scraper = Thread(target=lambda: found.append(scraped(opened.url)))
        with opened.serving(tmp_path, told):
            assert phases(scraped(opened.url)) == {"running"}
            scraped(opened.url)
            (tmp_path / "result.json").write_text("{}")
        monkeypatch.setattr(scraping, "say", lambda text, **_: scraper.start() if "run's end" in text else None)
    scraper.join()
    assert phases(found[0]) == {"finished"}
    assert found[0]["stageline_steps_total", ()] == 102


def phases(found: Values) -> set[str]:
    """The phases that are 1 in a scrape."""
    return {dict(labels)["phase"] for (name, labels), value in found.items() if name == "stageline_run_phase" and value}


def test_who_does_not_scrape_regularly_is_not_waited_for():
    scrapes = Scrapes()
    assert scrapes.due(0.0) == 0.0
    scrapes.note(0.0)
    assert scrapes.due(1.0) == 0.0  # a person who has looked once
    scrapes.note(15.0)
    assert scrapes.due(20.0) == 18.5
    assert scrapes.due(60.0) == 0.0  # Prometheus is gone
    scrapes.note(60.0)
    assert scrapes.due(60.0) == 68.5
    scrapes.note(60.1)  # a second Prometheus: the first is still expected
    assert scrapes.due(61.0) > 60
    scrapes.note(3660.0)
    assert scrapes.due(3660.0) == LAST


def test_an_answer_that_fails_is_an_error_and_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def fail(what: str) -> Mapping[str, Any]:
        raise KeyError(what)

    with endpoint(tmp_path, fail) as url:
        assert [got(url)[0] for _ in range(2)] == [500, 500]
        said: list[str] = []
        wait_for(lambda: said.append(capsys.readouterr().err) or "KeyError" in "".join(said))
    assert ("".join(said) + capsys.readouterr().err).count("a scrape was answered with an error") == 1


def test_only_numbers_are_served_and_only_by_get(tmp_path: Path):
    with endpoint(tmp_path) as url:
        assert got(url, "POST")[0] == 501


def test_the_broker_answers_a_scrape_in_its_own_turn(tmp_path: Path):
    """The coordinator is used by its own thread alone; what is scraped is what `queue ls` would print."""
    talk, questions, over = Conversation(), Questions(), Event()
    talk.join(0), talk.join(1)
    talk.send(name(0), report(0))

    def turns() -> None:
        while not over.wait(0.01):
            questions.answer(talk.core, talk.now)

    thread = Thread(target=turns)
    thread.start()
    try:
        with endpoint(tmp_path, asked_here(questions)) as url:
            found = scraped(url)
    finally:
        over.set()
        thread.join()
    ((_, answer),) = talk.send(b"me", Ask("queues"))
    assert found["stageline_run_phase", (("phase", "running"),)] == 1
    assert found["stageline_worker_up", (("worker", "1"),)] == 1
    assert answer.facts["queues"]


def test_a_broker_that_takes_no_turn_is_waited_for_within_a_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measured, "PATIENCE", 0.05)
    questions = Questions()
    assert asked_here(questions)("measures") is None
    assert len(questions) == 0  # though there was no answer: the thread waits no more
    questions.answer(Conversation().core, 0.0)


def test_what_the_coordinator_raises_is_for_who_asks(monkeypatch: pytest.MonkeyPatch):
    questions, core, raised = Questions(), Conversation().core, []

    def fail(*_: object) -> object:
        raise KeyError("measures")

    def ask() -> None:
        try:
            questions.ask("measures", 60)
        except KeyError as error:
            raised.append(error)

    monkeypatch.setattr(core, "answer", fail)
    asking = [Thread(target=ask) for _ in range(2)]
    for each in asking:
        each.start()
    wait_for(lambda: len(questions) == 2)
    questions.answer(core, 0.0)
    for each in asking:
        each.join(60)
    assert len(raised) == 2


def test_a_port_that_is_taken_is_told_before_anything_is_started(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
):
    with closing(socket.create_server(HERE)) as other:
        port = other.getsockname()[1]
        assert workspace.here("train", ".", "--metrics", str(port)) == ExitCode.FAILED
        said = capsys.readouterr().err
        assert workspace.here("broker", ".", "--metrics", f"127.0.0.1:{port}") == ExitCode.FAILED
    for part in ("--metrics", str(port), "in use", f"pid {psutil.Process().pid}", "0 takes any that is free"):
        assert part in said
    assert not workspace.runs()


@pytest.mark.parametrize("text", ["", "x", "70000", ":9464", "host:", "-1", "1.5", 5000 * "9", "*:9464"])
def test_what_is_no_port_is_refused(workspace: Workspace, capsys: pytest.CaptureFixture[str], text: str):
    assert workspace.here("train", ".", f"--metrics={text}") == ExitCode.USAGE
    assert "0.0.0.0:9464" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["[::1%nosuch]", "a..b", 70 * "a"])
def test_a_host_without_an_address_is_named(workspace: Workspace, capsys: pytest.CaptureFixture[str], host: str):
    assert workspace.here("train", ".", f"--metrics={host}:9464") == ExitCode.FAILED
    assert f"no address is known for the host '{host.strip('[]')}'" in capsys.readouterr().err
    assert not workspace.runs()


def test_another_machine_may_only_scrape_if_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for host, warned in (("127.0.0.1", False), ("localhost", False), ("0", True)):  # 0: every interface
        with ScrapeEndpoint((host, 0)) as opened, opened.serving(tmp_path, told):
            assert ("without a password" in capsys.readouterr().err) == warned


def test_an_endpoint_answers_from_the_moment_on_at_which_its_address_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    answers: list[int] = []
    with ScrapeEndpoint(("127.0.0.1", 0)) as opened:
        monkeypatch.setattr(scraping, "say", lambda *_, **__: answers.append(got(opened.url)[0]))
        with opened.serving(tmp_path, told):
            pass
    assert answers == [200]


def test_without_the_package_the_command_to_install_it_is_named(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "prometheus_client.exposition", None)
    assert workspace.here("train", ".", "--metrics", "0") == ExitCode.USAGE
    assert 'pip install "stageline[metrics]"' in capsys.readouterr().err
    assert not workspace.runs()


def rows(workspace: Workspace) -> dict[str, dict]:
    told = json.loads(workspace.command("queue", "ls", "--json").stdout)
    return {row["queue"]: row for row in told["queues"]}


@pytest.mark.slow
def test_what_is_scraped_of_a_run_is_what_queue_ls_prints(workspace: Workspace):
    sets = ("--set", "run.steps=200000", "--set", "recovery.lease=600", "--set", "recovery.restarts=1")
    train = workspace.start("train", ".", "--metrics", "0", *sets)
    url = until(train.stderr, "metrics at ").split()[-1]
    until(train.stderr, "running")
    wait_for(lambda: (rows(workspace).get("backward-0", {}).get("taken") or 0) > 20)
    workers = [psutil.Process(workspace.worker(index)) for index in range(2)]
    for each in workers:
        each.suspend()
    before: list[dict] = []

    def is_still() -> bool:
        before.append(rows(workspace))
        return len(before) > 1 and before[-1] == {
            queue: {**row, "oldest": before[-1][queue]["oldest"]} for queue, row in before[-2].items()
        }

    wait_for(is_still)
    known: list[Values] = []

    def is_scraped_anew() -> bool:
        known.append(scraped(url))
        return len(known) > 1 and known[-1] != known[-2]  # ages grow

    wait_for(is_scraped_anew)
    found = known[-1]
    for queue, row in before[-1].items():
        labels = (("queue", queue),)
        for series, field in (
            ("ready_messages", "ready"), ("in_flight_messages", "in_flight"), ("retained_messages", "retained"),
            ("retained_bytes", "bytes"), ("credit_used_messages", "credit_used"), ("resent_messages_total", "resent"),
            ("credit_limit_messages", "credit_limit"), ("taken_messages_total", "taken"),
        ):  # fmt: skip
            assert found.get((f"stageline_queue_{series}", labels)) == row[field], (queue, field)
        assert found.get(("stageline_queue_put_messages_total", labels), 0) <= (row["put"] or 0)
    assert found["stageline_queue_put_messages_total", (("queue", "backward-0"),)] > 20
    status = json.loads(workspace.command("status", "--json").stdout)
    assert found["stageline_finished_steps", ()] == found["stageline_steps_total", ()] == status["finished_floor"]
    assert found["stageline_step_seconds_count", ()] >= status["finished_floor"]
    for each in workers:
        each.resume()
    train.send_signal(signal.SIGINT)
    train.communicate()  # else a full pipe would hold it up
    assert train.wait() in (ExitCode.SAVED, ExitCode.INTERRUPTED)


@pytest.mark.slow
def test_a_run_that_goes_on_is_served_by_a_command_of_its_own_until_it_ends(workspace: Workspace):
    train = workspace.start("train", ".", "--set", "run.steps=200000")
    until(train.stderr, "running")
    serving = workspace.start("metrics", "--prometheus", "0")
    url = until(serving.stderr, "metrics at ").split()[-1]
    wait_for(lambda: scraped(url).get(("stageline_steps_total", ()), 0) > 3)
    train.send_signal(signal.SIGINT)
    train.communicate()  # else a full pipe would hold it up
    assert train.wait() in (ExitCode.SAVED, ExitCode.INTERRUPTED)
    serving.communicate()
    assert serving.wait() == 0


def test_a_run_that_is_over_is_served_no_more(workspace: Workspace, capsys: pytest.CaptureFixture[str]):
    folder = workspace.folder / "runs" / "small-1"
    folder.mkdir(parents=True)
    for file in ("plan.json", "result.json"):
        (folder / file).write_text("{}")
    assert workspace.here("metrics", "--prometheus", "0") == 0
    assert workspace.here("metrics", "--prometheus", "0", "--follow") == ExitCode.USAGE
    assert "--prometheus goes alone" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("url", ["memory://", "shm://"])
def test_a_worker_that_is_killed_shows_and_so_does_a_run_in_one_process(workspace: Workspace, url: str):
    sets = ("--set", "run.steps=200000", "--set", f"queues.url={url}", "--set", "recovery.restarts=9")
    train = workspace.start("train", ".", "--metrics", "0", *(sets if url == "shm://" else sets[:4]))
    at = until(train.stderr, "metrics at ").split()[-1]
    wait_for(lambda: scraped(at).get(("stageline_steps_total", ()), 0) > 3)
    if url == "shm://":
        psutil.Process(workspace.worker(1)).kill()
        lost = "stageline_worker_losses_total", (("worker", "1"),)
        wait_for(lambda: scraped(at).get(lost, 0) == 1)
        wait_for(lambda: scraped(at).get(("stageline_recoveries_total", ()), 0) == 1)
    train.send_signal(signal.SIGINT)
    train.communicate()  # else a full pipe would hold it up
    assert train.wait() in (ExitCode.SAVED, ExitCode.INTERRUPTED)

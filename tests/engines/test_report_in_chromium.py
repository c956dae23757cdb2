"""The page of a run in a browser: nothing goes wrong, nothing is asked for, axe is content, and keys and zoom work."""

import re

import pytest

from stageline.workers.extras.report.page import page_of
from stageline.workers.script.calls.page import framed
from support.browsers import PICTURES, Open, page_of_run, pictured
from support.pictured_runs import evil
from support.workspace import Workspace

pytestmark = pytest.mark.engines

SIZES = {2: (2, 8, 24), 8: (8, 32, 8), 64: (64, 64, 2)}  # stages, microbatches, steps
CANVAS = ".lanes canvas"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("stages", SIZES)
def test_a_page_opens_without_a_network_an_error_or_a_serious_finding(opened: Open, stages: int, scheme: str) -> None:
    found = opened(page_of_run(*SIZES[stages]), scheme)
    found.page.wait_for_selector(f"{CANVAS}[data-boxes]")
    PICTURES.mkdir(parents=True, exist_ok=True)
    found.page.screenshot(path=PICTURES / f"report-{stages}-{scheme}.png", full_page=True)
    for summary in found.page.query_selector_all("summary"):
        summary.click()
    assert found.violations() == []
    assert found.overflow() <= 0
    assert (found.wrong, found.requests) == ([], [])
    assert found.page.locator(".uplot").count() == 4


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_is_readable_on_a_phone(opened: Open, scheme: str) -> None:
    found = opened(page_of_run(*SIZES[8]), scheme, width=400)
    found.page.wait_for_selector(f"{CANVAS}[data-boxes]")
    PICTURES.mkdir(parents=True, exist_ok=True)
    found.page.screenshot(path=PICTURES / f"report-phone-{scheme}.png", full_page=True)
    for summary in found.page.query_selector_all("summary"):
        summary.click()
    assert found.overflow() <= 0
    assert found.violations() == []
    assert found.wrong == []


def test_the_page_of_the_largest_run_is_small() -> None:
    assert len(page_of_run(*SIZES[64]).encode()) < 3_000_000


def test_only_what_is_visible_of_a_large_timetable_is_drawn(opened: Open) -> None:
    found = opened(page_of_run(*SIZES[64]))
    canvas = found.page.locator(CANVAS)
    section = pictured(*SIZES[64]).sections()["timetable"]
    boxes = sum(len(lane[part]["start"]) for lane in section["lanes"] for part in ("ran", "idle", "planned"))
    found.page.wait_for_selector(f"{CANVAS}[data-boxes]")
    all_of_it = int(canvas.get_attribute("data-boxes") or 0)
    assert 0 < all_of_it < boxes
    for _ in range(12):
        found.page.get_by_role("button", name="Zoom in").click()
    found.until(f"Number(document.querySelector('{CANVAS}').dataset.boxes) < {all_of_it} / 10")
    found.page.get_by_role("button", name="Show all steps").click()
    found.until(f"Number(document.querySelector('{CANVAS}').dataset.boxes) === {all_of_it}")
    assert found.page.evaluate(f"document.querySelector('{CANVAS}').clientHeight") < 900  # the rest is scrolled to


def test_keys_reach_every_panel_and_choose_what_is_read_out(opened: Open) -> None:
    found = opened(page_of_run(*SIZES[2]))
    reached = set()
    for _ in range(60):
        found.page.keyboard.press("Tab")
        reached.add(found.page.evaluate("document.activeElement.tagName.toLowerCase()"))
    assert {"canvas", "button", "select", "summary"} <= reached
    found.page.locator(CANVAS).focus()
    readout = found.page.locator("output.readout")
    said = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "End", "+", "ArrowLeft", "0"):
        found.page.keyboard.press(key)
        said.append(readout.inner_text())
    assert said[0] == said[0].strip() != said[1]
    assert re.match(r"worker 0, stage 0: forward of microbatch \d, step \d+, .+, from .+ to .+", said[0])
    assert said[2].startswith("worker 1, ")
    assert "update, step 23" in said[3]
    assert found.wrong == []


def test_the_mouse_reads_out_what_it_points_at_and_drags(opened: Open) -> None:
    found = opened(page_of_run(*SIZES[2]))
    found.page.locator(CANVAS).scroll_into_view_if_needed()
    box = found.page.locator(CANVAS).bounding_box()
    assert box
    for _ in range(3):
        found.page.get_by_role("button", name="Zoom in").click()
    readout = found.page.locator("output.readout")
    said = set()
    for x in range(150, 1000, 25):
        for y in (32, 46, 70, 82):
            found.page.mouse.move(box["x"] + x, box["y"] + y)
            said.add(readout.inner_text().partition(",")[0])
    assert {"worker 0", "worker 1"} <= said
    found.page.mouse.move(box["x"] + 600, box["y"] + 45)
    before = found.page.screenshot()
    found.page.mouse.down()
    found.page.mouse.move(box["x"] + 300, box["y"] + 45, steps=5)
    found.page.mouse.up()
    found.page.wait_for_timeout(50)
    assert found.page.screenshot() != before


def test_texts_of_a_run_become_no_markup_and_no_script(opened: Open) -> None:
    sections = evil(pictured(2, 3, 6).sections())
    found = opened(page_of(sections, 0.0))
    plain = opened(page_of(pictured(2, 3, 6).sections(), 0.0))
    assert found.page.locator("img").count() == 0
    assert found.page.locator("script").count() == plain.page.locator("script").count() == 2
    assert "<script>alert(1)</script>" in found.page.locator("h1").inner_text()
    assert (found.wrong, found.requests) == ([], [])


def test_the_policy_keeps_other_scripts_and_requests_out(opened: Open) -> None:
    found = opened(page_of_run(2, 3, 6))
    found.page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.evil = 1";
            const image = document.createElement("img");
            image.src = "http://127.0.0.1:9/x.png";
            document.body.append(script, image);
        }"""
    )
    found.page.wait_for_timeout(100)
    assert found.page.evaluate("window.evil") is None
    assert len([said for said in found.wrong if "Content Security Policy" in said]) == 2


def test_a_notebook_shows_the_page_in_a_frame(opened: Open) -> None:
    found = opened(f"<!doctype html><title>notebook</title>{framed(page_of_run(2, 3, 6), 'run <1>')}")
    frame = found.page.frame_locator("iframe")
    frame.locator("canvas[data-boxes]").wait_for()
    assert frame.locator("h1").inner_text() == "run-1"
    assert (found.wrong, found.requests) == ([], [])


def test_a_run_that_was_trained_has_a_page(opened: Open, workspace: Workspace) -> None:
    trained = workspace.command("train", ".", "--set", "evaluation.every=2", "--set", "recovery.snapshot_every=2")
    assert trained.returncode == 0, trained.stderr
    (folder,) = workspace.runs()
    assert workspace.here("report", str(folder), "-o", "run.html") == 0
    found = opened((workspace.folder / "run.html").read_text())
    found.page.wait_for_selector(f"{CANVAS}[data-boxes]")
    PICTURES.mkdir(parents=True, exist_ok=True)
    found.page.screenshot(path=PICTURES / "report-trained.png", full_page=True)
    assert found.page.locator("#state").inner_text().startswith("finished")
    assert found.violations() == []
    assert (found.wrong, found.requests) == ([], [])

"""Draws mutants, runs the tests that pass them, and lists the survivors: see the package."""

import argparse
import random
import shlex
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mutants import notes
from mutants.places import Mutation, mutated, noting, places_in
from mutants.scratch import MODULE, ScratchCopy
from support.paths import ROOT

CORE = ("pipeline", "broker", "workers")
FIRST = 40  # tests in a mutant's first run, besides those of its module's name
ONE_TEST = "timeout=90"


@dataclass(frozen=True, slots=True)
class NotedTests:
    """Findings of the quick suite: seconds of each test that passed, and the tests that pass each place."""

    seconds: Mapping[str, float]
    passing: Mapping[int, set[str]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200, help="mutants")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout that is mutated")
    parser.add_argument("--without", nargs="*", default=["workers/extras"], help="rooms that are not the core's")
    parser.add_argument("--patience", type=float, default=240, help="seconds of tests for a mutant that survives")
    parser.add_argument("--before", default="", help='words before each command line of pytest: "nice -n 15"')
    parser.add_argument("--processes", default="4", help="of pytest, in the run that notes")
    chosen = parser.parse_args()
    drawn = draw(chosen.root, tuple(chosen.without), chosen.seed, chosen.count)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        scratch = ScratchCopy(chosen.root, Path(folder), shlex.split(chosen.before))
        noted = note(scratch, drawn, chosen.processes)
        survivors = [place for number, place in enumerate(drawn) if not _killed(scratch, number, place, noted, chosen)]
    print(f"\n{len(drawn) - len(survivors)} of {len(drawn)} killed (seed {chosen.seed}). Survivors:")
    for place in survivors:
        print(f"  {place}")


def draw(root: Path, without: Sequence[str], seed: int, count: int) -> list[Mutation]:
    """Return `count` places of the core in `root`, drawn uniformly."""
    found = [
        place
        for top in CORE
        for path in sorted((root / top).rglob("*.py"))
        if not (file := path.relative_to(root).as_posix()).startswith(tuple(f"{each}/" for each in without))
        for place in places_in(file, path.read_bytes())
    ]
    print(f"{len(found)} places in the core of {root}", flush=True)
    return random.Random(seed).sample(found, count)


def note(scratch: ScratchCopy, drawn: Sequence[Mutation], processes: str) -> NotedTests:
    """Run the quick suite while every place notes the tests that pass it; the copy is then as it was."""
    by_file: dict[str, list[tuple[int, Mutation]]] = defaultdict(list)
    for number, place in enumerate(drawn):
        by_file[place.file].append((number, place))
    before = {file: (scratch.root / file).read_bytes() for file in by_file}
    for file, places in by_file.items():
        scratch.write(file, noting(before[file], places, MODULE))
    scratch.pytest(["-n", processes, "--dist", "worksteal", "-o", "timeout=300", "tests"], limit=7200, notes=True)
    for file, source in before.items():
        scratch.write(file, source)
    seconds: dict[str, float] = defaultdict(float)
    failed = set()
    for line in (scratch.packages / notes.OUTCOMES).read_text().splitlines():
        outcome, duration, test = line.split("\t", 2)
        seconds[test] += float(duration)
        if outcome != "passed":
            failed.add(test)
    passing: dict[int, set[str]] = defaultdict(set)
    for line in (scratch.packages / notes.PLACES).read_text().splitlines():
        number, _, test = line.partition("\t")
        passing[int(number)].add(test)
    print(f"{len(seconds) - len(failed)} tests passed while they were noted, {len(failed)} did not:", flush=True)
    for test in sorted(failed):
        print(f"    {test}", flush=True)
    return NotedTests({test: took for test, took in seconds.items() if test not in failed}, passing)


def rounds(place: Mutation, passing: set[str], seconds: Mapping[str, float], patience: float) -> Iterator[list[str]]:
    """Yield the tests of a mutant's first run, and those of its second."""
    path = PurePosixPath(place.file)
    room, named = f"tests/{path.parent}", f"tests/{path.parent}/test_{path.stem}"
    quickest = sorted(seconds, key=seconds.__getitem__)
    of_name = [test for test in quickest if test.startswith(named)]
    others = [
        test
        for test in quickest
        if test not in of_name and (test in passing or (place.imported and test.startswith((room, "tests/covering"))))
    ]
    yield of_name + others[:FIRST]
    wider = []
    for test in others[FIRST:]:
        patience -= seconds[test]
        if patience > 0:
            wider.append(test)
    yield wider


def _killed(scratch: ScratchCopy, number: int, place: Mutation, noted: NotedTests, chosen: argparse.Namespace) -> bool:
    source = (scratch.root / place.file).read_bytes()
    scratch.write(place.file, mutated(source, place))
    try:
        run = 0
        for tests in rounds(place, noted.passing.get(number, set()), noted.seconds, chosen.patience):
            if not tests:
                continue
            run += len(tests)
            limit = 300 + 10 * sum(noted.seconds[test] for test in tests)
            if failed := scratch.pytest(["-x", "-o", ONE_TEST, *tests], limit).failed:
                print(f"killed    {number:3}  {place}\n               by {failed}", flush=True)
                return True
    finally:
        scratch.write(place.file, source)
    print(f"SURVIVED  {number:3}  {place}\n               {run} tests", flush=True)
    return False


if __name__ == "__main__":
    main()

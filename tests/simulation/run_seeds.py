"""Runs seeds of the simulation, or one of them: see the package `simulation` for what is real in it and what is not.

python -m simulation.run_seeds --seeds 20000 --from 2000
python -m simulation.run_seeds --seed 1234

Run it from the project's folder with PYTHONPATH=tests.
"""

import argparse
import sys
import traceback
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from simulation.scenario import Scenario, drawn, drawn_script, with_leavers, with_lost_disks, with_pauses
from simulation.world import World


@dataclass(frozen=True, slots=True)
class Found:
    """Outcome of a seed: the faults of the run, its virtual seconds, and the errors found in it."""

    seed: int
    fired: Counter[str]
    seconds: float
    wrong: str = ""
    script: bool = False
    pauses: bool = False
    leavers: bool = False
    disks: int = 0

    def __str__(self) -> str:
        flags = "".join(f" --{name}" for name in ("script", "pauses", "leavers") if getattr(self, name))
        flags += f" --disks {self.disks}" if self.disks else ""
        return f"PYTHONPATH=tests python -m simulation.run_seeds --seed {self.seed}{flags}    # {self.wrong}"


def simulate(
    seed: int,
    *,
    script: bool = False,
    pauses: bool = False,
    leavers: bool = False,
    disks: int = 0,
    tell: bool = False,
) -> Found:
    """Runs one seed, with `script` as a run that a script drives. Whatever it raises shows that something is wrong;
    `disks`: 1, 2: one disk is lost at a time, or two may be; `tell`: print where."""
    world = World(_scenario(seed, script=script, pauses=pauses, leavers=leavers, disks=disks))
    began = world.environment.clock.now
    wrong = ""
    try:
        world.run()
    except Exception as error:  # noqa: BLE001  # a bug may show in any way
        wrong = f"{type(error).__name__}: {error}"
        if tell:
            traceback.print_exc()
    return Found(seed, world.fired, world.environment.clock.now - began, wrong, script, pauses, leavers, disks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="this one alone, and all about it")
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first of them")
    parser.add_argument("--script", action="store_true", help="runs that a script drives")
    parser.add_argument("--pauses", action="store_true", help="runs that a person pauses")
    parser.add_argument("--leavers", action="store_true", help="runs that workers leave on notice")
    parser.add_argument("--disks", type=int, default=0, help="disks that are lost at a time, of machines apart: 1 or 2")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    chosen = parser.parse_args()
    kind = {"script": chosen.script, "pauses": chosen.pauses, "leavers": chosen.leavers, "disks": chosen.disks}
    if chosen.seed is not None:
        return _tell_one(chosen.seed, kind)
    return _run_many(range(chosen.first, chosen.first + chosen.seeds), chosen.jobs, kind)


def _scenario(seed: int, *, script: bool, pauses: bool, leavers: bool, disks: int) -> Scenario:
    found = drawn_script(seed) if script else drawn(seed)
    if disks:
        found = with_lost_disks(found, many=disks > 1)
    found = with_pauses(found) if pauses else found
    return with_leavers(found) if leavers else found


def _tell_one(seed: int, kind: Mapping[str, Any]) -> int:
    print(_scenario(seed, **kind))
    found = simulate(seed, **kind, tell=True)
    _print_fired(found.fired)
    print(f"{found.seconds:.6f} virtual seconds: {found.wrong or 'all is well'}")
    return 1 if found.wrong else 0


def _run_many(seeds: range, jobs: int, kind: Mapping[str, Any]) -> int:
    fired: Counter[str] = Counter()
    failed = 0
    with ProcessPoolExecutor(jobs) as pool:
        for found in pool.map(partial(simulate, **kind), seeds, chunksize=50):
            fired += found.fired
            if found.wrong:
                failed += 1
                print(found.seed if failed > 100 else found, flush=True)
    _print_fired(fired)
    print(f"{len(seeds)} seeds from {seeds.start}, {failed} failed")
    return 1 if failed else 0


def _print_fired(fired: Counter[str]) -> None:
    for fault, times in sorted(fired.items()):
        print(f"{times:9}  {fault}")


if __name__ == "__main__":
    sys.exit(main())

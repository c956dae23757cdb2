"""Claim: shared memory is no slower than ZeroMQ where workers are more than processors."""

from functools import partial
from pathlib import Path

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.rounds import Spread
from benchmarks.measuring.windows import ratios, take_turns
from benchmarks.trainers import ours

CHARGPT = Path(__file__).parents[2] / "examples" / "chargpt" / "stageline.toml"
STEPS = 150  # in each round
SECONDS = 2.0  # of a window

FOUR_WORKERS = ("schedule.name=1f1b", *(f"workers.{index}.stages=[{index}]" for index in range(4)))
LAYOUTS = {"chargpt, 4 stages interleaved on 2 workers": (), "chargpt, 4 workers": FOUR_WORKERS}
TRANSPORTS = "ipc", "shm"

ABOUT = """\
The example chargpt (a transformer of 6 blocks with dropout) as it is, and with a worker for each of its four stages,
over `ipc://` and over `shm://`. The two runs are there at once and take turns of 2 seconds, in which all processes of
the other are stopped. Rates are steps per second as `min / median / max` over the windows, the ratios those of each
window over shm to the two over ipc around it: median, and the quartiles."""


def measure(rounds: int) -> BenchmarkResult:
    rows, facts = [], {}
    for layout, sets in LAYOUTS.items():
        common = (f"run.steps={STEPS * rounds}", "recovery.restarts=0", "recovery.snapshot_every=0", *sets)
        tasks = {name: partial(ours.train_plan, CHARGPT, (*common, f"queues.url={name}://")) for name in TRANSPORTS}
        rates = {name: turns.rates for name, turns in take_turns(tasks, SECONDS).items()}
        found = ratios(*rates.values())
        low, middle, high = found.quartiles
        spreads = (Spread(tuple(rate for rate in each if rate)) for each in rates.values())
        shown = (f"{rate.low:.3g} / {rate.middle:.3g} / {rate.high:.3g}" for rate in spreads)
        rows.append((layout, *shown, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", str(len(found.rounds))))
        facts[layout] = {**rates, "ratios": found.rounds}
    columns = ("run", *TRANSPORTS, "shm to ipc", "quartiles", "windows")
    return BenchmarkResult(
        "More workers than processors", ABOUT, (Table("", columns, tuple(rows)),), {"transports": facts}
    )

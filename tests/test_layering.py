"""Rooms form a ladder: imports go down it only, no file is in a circle, and rooms that decide do nothing.

Every folder of the product must stand on the ladder below; one that does not fails.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from support.paths import ROOT

TOPS = ("pipeline", "broker", "workers")
PACKAGE = "src/stageline"  # the public names, and links to the tops

PURE, TENSORS, DOING = "pure", "pure but for tensors", "doing"

# From the bottom to the top; a room may import those above it in this list, and itself.
LADDER = {
    "pipeline": TENSORS,
    "pipeline/process": DOING,
    "pipeline/schedule": PURE,
    "pipeline/program": PURE,
    "pipeline/choice": PURE,
    "pipeline/plan/keys": PURE,
    "pipeline/plan": PURE,
    "pipeline/stage/layers": TENSORS,
    "pipeline/features": TENSORS,
    "pipeline/stage": TENSORS,
    "pipeline/data": DOING,
    "pipeline/model/layered": DOING,
    "pipeline/model": DOING,
    "broker": PURE,
    "broker/keys": PURE,
    "broker/codec": TENSORS,
    "broker/control": DOING,
    "broker/queues": DOING,
    "broker/transports": DOING,
    "broker/transports/redis": DOING,
    "broker/transports/sockets": DOING,
    "broker/ledger": PURE,
    "broker/slowness": PURE,
    "broker/coordinator": PURE,
    "workers": PURE,
    "workers/extras": PURE,
    "workers/extras/fitting": PURE,
    "workers/disk": DOING,
    "workers/keys": DOING,
    "workers/runs": DOING,
    "workers/extras/report": DOING,
    "workers/runtime": DOING,
    "workers/extras/prefix_cache": DOING,
    "workers/checkpoint": DOING,
    "workers/extras/exchange": DOING,
    "workers/extras/recording": DOING,
    "workers/control": DOING,
    "workers/process": DOING,
    "workers/extras/preflight": DOING,
    "workers/extras/consent": DOING,
    "workers/launch": DOING,
    "workers/script/calls": DOING,
    "workers/script/processes": DOING,
    "workers/script": DOING,
    "workers/extras/forward": DOING,
    "workers/extras/audit": DOING,
    "workers/cli": DOING,
    "workers/cli/templates": DOING,
    "workers/cli/asking": DOING,
    "workers/cli/tables": DOING,
    "workers/cli/monitoring": DOING,
    "workers/cli/top": DOING,
    "workers/cli/commands": DOING,
    PACKAGE: DOING,
}

# Files that decide, in rooms that also do.
DECIDING = {
    "broker/control/messages.py": PURE,
    "broker/control/protocol.py": PURE,
    "broker/control/records.py": PURE,
    "broker/transports/sockets/connection_rules.py": PURE,
    "broker/rate_limit.py": PURE,
    "broker/queues/base.py": TENSORS,
    "broker/queues/delivery.py": TENSORS,
    "broker/queues/requests.py": PURE,
    "pipeline/data/batch.py": TENSORS,
    "pipeline/data/feed.py": TENSORS,
    "pipeline/data/parts.py": TENSORS,
    "pipeline/data/source.py": TENSORS,
    "pipeline/data/__init__.py": TENSORS,
    "pipeline/addresses.py": PURE,
    "pipeline/evaluation.py": PURE,
    "pipeline/model/layered/decoders.py": TENSORS,
    "pipeline/model/layered/families.py": TENSORS,
    "pipeline/model/layered/layers.py": TENSORS,
    "workers/checkpoint/regroup.py": TENSORS,
    "workers/control/joining.py": PURE,
    "workers/runtime/machine.py": PURE,
}

# The public interface of the core, on which the extras are built: the names that `stageline` exports, those in the
# `__all__` of a core room, the files at the top of the three folders, and these files.
PUBLIC = (
    "broker/codec/codecs.py",  # what a queue makes of tensors
    "broker/codec/tensors.py",
    "broker/control/records.py",  # values in a run's records
    "pipeline/model/consent.py",  # what may be loaded
    "pipeline/model/cut.py",  # a plan's model and its stages
    "pipeline/model/layer_costs.py",
    "pipeline/model/load.py",
    "pipeline/model/plan_stage.py",
    "pipeline/model/segment.py",
    "pipeline/model/stage_layout.py",
    "pipeline/model/tensor_files.py",
    "pipeline/plan/difference.py",  # a plan as tables of keys, and files that are written like one
    "pipeline/plan/errors.py",
    "pipeline/plan/keys/key_types.py",
    "pipeline/plan/keys/names.py",
    "pipeline/plan/tables.py",
    "pipeline/stage/layers/loss.py",
    "pipeline/stage/stage.py",
    "workers/checkpoint/continuable.py",  # checkpoints
    "workers/checkpoint/recut.py",
    "workers/checkpoint/regroup.py",
    "workers/checkpoint/trained_weights.py",
    "workers/checkpoint/snapshot.py",
    "workers/checkpoint/source.py",
    "workers/disk/atomic_file.py",  # files that are whole or absent
    "workers/disk/owned_folder.py",
    "workers/disk/tensor_file.py",
    "workers/runs/folder.py",  # the folder of a run
    "workers/runs/metrics.py",  # what it has measured
    "workers/runs/records.py",
    "workers/runs/owner.py",
    "workers/runtime/executor.py",
    "workers/runtime/left_out.py",  # the mark in place of activations
    "workers/runtime/worker_feature.py",  # the protocol of a worker's features
)

# Extras that still reach further into the core, and why; the list may only become shorter.
REACHING = {
    "workers/extras/exchange/load.py": "fills an unsplit model as stages are filled",
    "workers/extras/forward/forward_run.py": "begins a scripted run without a Line",
    "workers/extras/prefix_cache/opening.py": "computes stages as a worker does",
    "workers/extras/prefix_cache/cache.py": "keeps rows in the form of messages",
    "workers/extras/preflight/doctor.py": "opens the transports of a plan, and asks its broker",
    "workers/extras/preflight/dry_run.py": "carries out a step without workers",
    "workers/extras/preflight/measure.py": "likewise",
    "workers/extras/preflight/memory_choice.py": "likewise",
    "workers/extras/preflight/pure_prefix.py": "likewise",
    "workers/extras/preflight/trial.py": "likewise",
    "workers/extras/preflight/trial_stages.py": "likewise",
    "workers/extras/preflight/trials.py": "says how a process has ended, in the words of the broker",
    "workers/extras/preflight/worker_memory.py": "counts what transports and offloaded files take",
    "workers/extras/recording/recorder.py": "records in the form of messages",
    "workers/extras/recording/records.py": "likewise",
    "workers/extras/recording/replay.py": "carries out one instruction without a loop",
    "workers/extras/recording/skipping.py": "stands between the executor and its losses",
    "workers/extras/recording/taps.py": "follows the loop and its progress",
}

# Files of the core that import an extra by its name, and why; the list may only become shorter. The commands and the
# public names import extras by purpose, and `worker_feature.py` names features in a table.
ON_EXTRAS = {
    "workers/launch/launch.py": "tries a plan before it runs",
}

# What only the edge may touch: clocks, chance, the system, threads, sockets.
EDGE = {
    "asyncio",
    "multiprocessing",
    "os",
    "psutil",
    "random",
    "redis",
    "secrets",
    "select",
    "socket",
    "sqlite3",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "zmq",
}


def room(path: Path) -> str:
    return path.parent.relative_to(ROOT).as_posix()


@cache
def files() -> Mapping[str, Path]:
    """The product's files by the names they are imported by, without `stageline.`."""
    found = sorted(path for top in TOPS for path in (ROOT / top).rglob("*.py"))
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in found}
    return names | {path.stem: path for path in (ROOT / PACKAGE).glob("*.py")}


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text())))


@cache
def imported(path: Path) -> tuple[str, ...]:
    """The absolute names of what a file imports, wherever in it."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    package = ("stageline", *([] if room(path) == PACKAGE else path.parent.relative_to(ROOT).parts))
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def needs(path: Path) -> set[str]:
    """The product's files that a file imports."""
    names = {name.removeprefix("stageline.") for name in imported(path) if name.startswith("stageline.")}
    return {name if name in files() else name.rpartition(".")[0] for name in names} & files().keys()


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def test_every_folder_and_file_of_the_product_is_on_the_ladder() -> None:
    assert {room(path) for path in files().values()} == set(LADDER)
    assert all((ROOT / name).exists() for name in DECIDING)


def test_no_room_imports_one_that_is_built_on_it() -> None:
    order = list(LADDER)
    arrows = {(name, other) for name, path in files().items() for other in needs(path)}
    places = {name: order.index(room(path)) for name, path in files().items()}
    upward = sorted(f"{name} imports {other}" for name, other in arrows if places[other] > places[name])
    assert not upward


def test_no_file_is_in_a_circle_of_imports() -> None:
    waiting = {name: needs(path) - {name} for name, path in files().items()}
    while free := {name for name, others in waiting.items() if not others & waiting.keys()}:
        waiting = {name: others for name, others in waiting.items() if name not in free}
    assert not waiting


def interface() -> set[str]:
    """The modules that the public interface of the core is in."""
    top = {name for name, path in files().items() if room(path) in TOPS}
    rooms = {name for name, path in files().items() if path.name == "__init__.py" and "__all__" in path.read_text()}
    exported = needs(ROOT / PACKAGE / "__init__.py")
    return top | rooms | exported | {module_name(path) for path in PUBLIC}


def module_name(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def test_extras_are_built_on_the_public_interface() -> None:
    allowed = interface()
    extras = {name: path for name, path in files().items() if name.startswith("workers.extras.")}
    reaching = {
        name
        for name, path in extras.items()
        if {other for other in needs(path) if other not in allowed and not other.startswith("workers.extras.")}
    }
    assert reaching == set(map(module_name, REACHING))
    assert set(map(module_name, PUBLIC)) <= {other for path in extras.values() for other in needs(path)}


def test_the_core_does_without_extras() -> None:
    core = {name: path for name, path in files().items() if not name.startswith(("workers.extras", "workers.cli"))}
    built = {name for name, path in core.items() if any(other.startswith("workers.extras") for other in needs(path))}
    assert built == {"__init__", *map(module_name, ON_EXTRAS)}


@pytest.mark.parametrize("kind", [PURE, TENSORS])
def test_what_decides_has_no_clock_no_chance_and_no_system(kind: str) -> None:
    rooms = {name for name, of in LADDER.items() if of == kind}
    deciding = [path for path in files().values() if room(path) in rooms]
    deciding += [ROOT / name for name, of in DECIDING.items() if of == kind]
    forbidden = EDGE | ({"torch"} if kind == PURE else set())
    wrong = {str(path): sorted(tops(path) & forbidden) for path in deciding if tops(path) & forbidden}
    assert deciding
    assert not wrong


def test_nothing_is_imported_by_the_name_of_its_folder() -> None:
    others = [path for top in ("tests", "examples", "benchmarks") for path in (ROOT / top).rglob("*.py")]
    by_folder = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(TOPS)})\b", re.MULTILINE)  # in code, or in a string
    seeming = [path for path in [*files().values(), *others] if by_folder.search(path.read_text())]
    assert not [str(path) for path in seeming if tops(path) & set(TOPS)]


def test_nothing_received_is_unpickled_or_evaluated() -> None:
    forbidden = {"pickle", "marshal", "dill", "cloudpickle", "shelve"}
    for path in files().values():
        assert not tops(path) & forbidden, path
        for node in nodes(path):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "compile", "__import__"), f"{path}:{node.lineno}"
                assert not called.endswith(("recv_pyobj", "send_pyobj")), f"{path}:{node.lineno}"
                if called.endswith("torch.load"):
                    assert "weights_only=True" in ast.unparse(node), f"{path}:{node.lineno}"


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, set[Path]] = {}
    for top in (*TOPS, "tests", "benchmarks"):
        for path in (ROOT / top).rglob("*.py"):
            for name in re.findall(r"^\s*class (\w+)[(:]", path.read_text(), re.MULTILINE):  # in code, or in a string
                places.setdefault(name, set()).add(path)
    several = {name: found for name, found in places.items() if len(found) > 1}
    assert not {name: found for name, found in several.items() if sum(name in classes(path) for path in found) > 1}


def classes(path: Path) -> set[str]:
    return {node.name for node in nodes(path) if isinstance(node, ast.ClassDef)}

"""JSON schemas of what reading commands print with --json, made of the classes of their facts.

`python -m stageline.workers.cli.schemas docs/schemas` writes one file for each. Each command with --json has a line in
`SCHEMAS`: the name that its answer has under "schema", the class of its facts, whose docstring describes each
attribute, and the commands that print it. Where an answer of a broker comes from (`Envelope`) is added.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Any

import msgspec

from stageline.broker.control.answers import (
    Bare,
    Envelope,
    ExportFacts,
    MicrobatchesFacts,
    PeekFacts,
    QueueFacts,
    QueuesFacts,
    StackFacts,
    TraceFacts,
)
from stageline.broker.control.history_answers import StoryFacts
from stageline.broker.control.log_answer import LogLine
from stageline.broker.control.pace_answers import StatusFacts, TimetableFacts, WhyFacts
from stageline.broker.control.pauses import PauseChange
from stageline.workers.checkpoint.source import CheckpointList, CheckpointVerdicts
from stageline.workers.extras.audit.audit import AuditReport
from stageline.workers.extras.fitting import HostFit
from stageline.workers.extras.preflight.trial_result import Estimate
from stageline.workers.extras.recording.probe import ProbeReport
from stageline.workers.runs.account import RunAccount
from stageline.workers.runs.comparison import RunDifference
from stageline.workers.runs.folder import Result
from stageline.workers.runs.listing import RunList

from .bundle import BundleReport
from .bundle_archive import BundleFacts
from .printed import (
    CheckpointSplit,
    CommandError,
    DoctorFindings,
    ErrorList,
    EvaluatedModel,
    LeftWorker,
    RemovedRuns,
    ReplayedMicrobatch,
    RunMetrics,
    ScheduleList,
    ShownSchedule,
    StoppedRun,
)
from .printed_keys import (
    AdmittedKey,
    KeyFile,
    KnownKeys,
    MadeInvitation,
    PrintedLine,
    ReloadedParties,
    RevokedKey,
    RotatedKey,
)


@dataclass(frozen=True, slots=True)
class Published:
    """Output of commands: the class of its facts, and by which commands it is printed.

    Attributes:
        facts: Class of the facts.
        commands: Commands that print them: "run ls"; none for what any command prints.
        envelope: True if where they come from stands beside them.
    """

    facts: type
    commands: tuple[str, ...]
    envelope: bool


def _by(*commands: str, facts: type) -> Published:
    """Return the output of commands that read files, or that compute or order something."""
    return Published(facts, commands, envelope=False)


def _asked(command: str, facts: type) -> Published:
    """Return the output of a command that asks a run's broker, or its records."""
    return Published(facts, (command,), envelope=True)


SCHEMAS: Mapping[str, Published] = {
    "audit/1": _by("audit", facts=AuditReport),
    "bundle/1": _by("bundle", facts=BundleFacts),
    "checkpoint-ls/1": _by("checkpoint ls", facts=CheckpointList),
    "checkpoint-split/1": _by("checkpoint split", facts=CheckpointSplit),
    "checkpoint-verify/1": _by("checkpoint verify", facts=CheckpointVerdicts),
    "doctor/1": _by("doctor", facts=DoctorFindings),
    "doctor-from/1": _by("doctor", facts=BundleReport),
    "error/1": _by(facts=CommandError),
    "errors/1": _by("errors", facts=ErrorList),
    "eval/1": _by("eval", facts=EvaluatedModel),
    "fit/1": _by("plan", facts=HostFit),
    "key/1": _by("keys new", "keys show", facts=KeyFile),
    "keys/1": _asked("keys ls", KnownKeys),
    "keys-admit/1": _by("keys admit", facts=AdmittedKey),
    "keys-invite/1": _by("keys invite", facts=MadeInvitation),
    "keys-line/1": _by("keys line", facts=PrintedLine),
    "keys-reload/1": _by("keys reload", facts=ReloadedParties),
    "keys-revoke/1": _by("keys revoke", facts=RevokedKey),
    "keys-rotate/1": _by("keys rotate", facts=RotatedKey),
    "logs/1": _by("logs", facts=LogLine),
    "metrics/1": _by("metrics", facts=RunMetrics),
    "microbatches/1": _asked("microbatch ls", MicrobatchesFacts),
    "peek/1": _asked("queue peek", PeekFacts),
    "plan/1": _by("plan", facts=Estimate),
    "probe/1": _by("probe", facts=ProbeReport),
    "queue/1": _asked("queue show", QueueFacts),
    "queue-export/1": _by("queue export", facts=ExportFacts),
    "queues/2": _asked("queue ls", QueuesFacts),
    "replay/1": _by("replay", facts=ReplayedMicrobatch),
    "run-diff/1": _by("run diff", facts=RunDifference),
    "run-ls/1": _by("run ls", facts=RunList),
    "run-leave/1": _by("run leave", facts=LeftWorker),
    "run-pause/1": _by("run pause", facts=PauseChange),
    "run-resume/1": _by("run resume", facts=PauseChange),
    "run-rm/1": _by("run rm", facts=RemovedRuns),
    "run-show/1": _by("run show", facts=RunAccount),
    "run-stop/1": _by("run stop", facts=StoppedRun),
    "schedule/1": _by("schedule show", facts=ShownSchedule),
    "schedules/1": _by("schedule list", facts=ScheduleList),
    "stack/1": _asked("stack", StackFacts),
    "status/1": _asked("status", StatusFacts),
    "story/1": _asked("story", StoryFacts),
    "timetable/1": _asked("timetable", TimetableFacts),
    "trace-export/1": _by("trace export", facts=TraceFacts),
    "train/1": _by("train", facts=Result),
    "why/1": _asked("why", WhyFacts),
}
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ATTRIBUTE = re.compile(r"^    (\w+): (.+(?:\n      .+)*)", re.MULTILINE)
Schema = dict[str, Any]


def schema_of(name: str) -> Schema:
    """Return the JSON schema of the answer that has `name` under "schema"."""
    known, beside = SCHEMAS[name].facts, Envelope if SCHEMAS[name].envelope else Bare
    _, found = msgspec.json.schema_components([known, beside], ref_template="#/$defs/{name}")
    described = {each: _described(schema) for each, schema in found.items()}
    envelope, facts = described.pop(beside.__name__), described.pop(known.__name__)
    properties = {**envelope["properties"], **facts["properties"], "schema": {"const": name}}
    return {
        "$schema": _DIALECT,
        "title": name,
        "description": facts["description"],
        "type": "object",
        "properties": properties,
        "required": list(dict.fromkeys([*envelope["required"], *facts["required"]])),
        "additionalProperties": False,
        **({"$defs": dict(sorted(described.items()))} if described else {}),
    }


def file_name(name: str) -> str:
    """Return the name of the file with the schema `name`: "queues-2.json"."""
    return f"{name.replace('/', '-')}.json"


def text_of(name: str) -> str:
    """Return the content of the file with the schema `name`."""
    return msgspec.json.format(msgspec.json.encode(schema_of(name)), indent=2).decode() + "\n"


def write(folder: Path) -> None:
    """Write the files of all schemas into `folder`, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SCHEMAS:
        (folder / file_name(name)).write_text(text_of(name))


def _described(schema: Schema) -> Schema:
    """Return the schema of a class, which takes no other keys, with what its docstring says of each attribute."""
    text = cleandoc(schema.get("description", ""))
    said, _, attributes = text.partition("\n\nAttributes:\n")
    known = {name: " ".join(words.split()) for name, words in _ATTRIBUTE.findall(attributes)}
    properties = {
        name: {**each, "description": known[name]} if name in known else each
        for name, each in schema.get("properties", {}).items()
    }
    known_alone = {"properties": properties, "additionalProperties": False} if properties else {}
    return {**schema, "description": " ".join(said.split()), **known_alone}


if __name__ == "__main__":
    write(Path(sys.argv[1]))

"""JSON schemas of what reading commands print with --json, made of the classes of their facts.

`python -m stageline.workers.cli.schemas docs/schemas` writes one file for each. A command that wants its schema
published has a line in `SCHEMAS`: the name that its answer has under "schema", and the class of its facts, whose
docstring describes each attribute. Where an answer comes from (`Envelope`) is added to all.
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
from stageline.broker.control.log_answer import LogLine
from stageline.broker.control.pace_answers import StatusFacts, TimetableFacts, WhyFacts
from stageline.broker.control.pauses import PauseChange
from stageline.broker.control.story_answer import StoryFacts
from stageline.workers.checkpoint.source import CheckpointList, CheckpointVerdicts
from stageline.workers.extras.bundle.archive import BundleFacts
from stageline.workers.runs.account import RunAccount
from stageline.workers.runs.comparison import RunDifference
from stageline.workers.runs.listing import RunList

from .bundle import BundleReport
from .printed import DoctorFindings, ErrorList, LeftWorker, RemovedRuns, ScheduleList, StoppedRun


@dataclass(frozen=True, slots=True)
class Published:
    """Output of a command: the class of its facts; with an `envelope`, where they come from stands beside them."""

    facts: type[msgspec.Struct]
    envelope: bool = True


SCHEMAS: Mapping[str, Published] = {
    "bundle/1": Published(BundleFacts, envelope=False),
    "checkpoint-ls/1": Published(CheckpointList, envelope=False),
    "checkpoint-verify/1": Published(CheckpointVerdicts, envelope=False),
    "errors/1": Published(ErrorList, envelope=False),
    "schedules/1": Published(ScheduleList, envelope=False),
    "doctor/1": Published(DoctorFindings, envelope=False),
    "doctor-from/1": Published(BundleReport, envelope=False),
    "logs/1": Published(LogLine, envelope=False),
    "microbatches/1": Published(MicrobatchesFacts),
    "peek/1": Published(PeekFacts),
    "queue/1": Published(QueueFacts),
    "queue-export/1": Published(ExportFacts, envelope=False),
    "queues/2": Published(QueuesFacts),
    "stack/1": Published(StackFacts),
    "run-diff/1": Published(RunDifference, envelope=False),
    "run-leave/1": Published(LeftWorker, envelope=False),
    "run-pause/1": Published(PauseChange, envelope=False),
    "run-resume/1": Published(PauseChange, envelope=False),
    "run-rm/1": Published(RemovedRuns, envelope=False),
    "run-stop/1": Published(StoppedRun, envelope=False),
    "run-ls/1": Published(RunList, envelope=False),
    "run-show/1": Published(RunAccount, envelope=False),
    "status/1": Published(StatusFacts),
    "story/1": Published(StoryFacts),
    "timetable/1": Published(TimetableFacts),
    "trace-export/1": Published(TraceFacts, envelope=False),
    "why/1": Published(WhyFacts),
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
    properties = {**envelope["properties"], "schema": {"const": name}, **facts["properties"]}
    return {
        "$schema": _DIALECT,
        "title": name,
        "description": facts["description"],
        "type": "object",
        "properties": properties,
        "required": [*envelope["required"], *facts["required"]],
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
    """Return the schema of a class with what its docstring says in the places where it belongs."""
    text = cleandoc(schema.get("description", ""))
    said, _, attributes = text.partition("\n\nAttributes:\n")
    known = {name: " ".join(words.split()) for name, words in _ATTRIBUTE.findall(attributes)}
    properties = {
        name: {**each, "description": known[name]} if name in known else each
        for name, each in schema.get("properties", {}).items()
    }
    return {**schema, "description": " ".join(said.split()), **({"properties": properties} if properties else {})}


if __name__ == "__main__":
    write(Path(sys.argv[1]))

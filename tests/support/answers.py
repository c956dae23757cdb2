"""Answers of commands as JSON, held to their published schemas."""

import json
from typing import Any

import jsonschema

from stageline.workers.cli.schemas import schema_of


def conforming(text: str) -> dict[str, Any]:
    """Return the answer that a command has printed. Raises `ValidationError` if it departs from its schema."""
    facts: dict[str, Any] = json.loads(text)
    jsonschema.validate(facts, schema_of(facts["schema"]))
    return facts

"""The JSON schema of a plan file, by which editors complete and check stageline.toml."""

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from .keys.models import PlanTables


def plan_schema() -> dict[str, Any]:
    """The schema, in draft 7: the newest that the editors' TOML extensions know well."""
    schema = PlanTables.model_json_schema(ref_template="#/definitions/{model}", schema_generator=_Draft7)
    definitions = schema.pop("$defs")
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "definitions": definitions}


class _Draft7(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # a title would repeat the key

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """TOML has no null: a key whose default is None has none."""
        if schema.get("default", ...) is None:
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)

"""The JSON schema of a recipe, for editors that complete and check YAML."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from distprune._recipe_form.form import RecipeForm


class _WithoutNull(GenerateJsonSchema):
    """A key without a value is an error, so null is neither a type nor a default."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # it is the key once more

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        result = super().default_schema(schema)
        if result.get("default", 0) in (None, []):
            del result["default"]
        return result


def recipe_schema() -> dict[str, Any]:
    """The schema, as plain values."""
    schema = RecipeForm.model_json_schema(schema_generator=_WithoutNull)
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema}

"""How schemas are handed to llguidance: the spacing of JSON, and the formats of texts that are enforced."""

from __future__ import annotations

from typing import Any

SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as ``json.dumps`` writes it: with free white space a small model may write nothing else, and less is forced."""
FORMATS = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"))
"""Those that llguidance knows; it refuses a schema with another one."""
_NAMED = ("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions")
"""Keys whose members are schemas by names that mean nothing: a property may be called ``format``."""
_DATA = ("const", "enum", "default", "example", "examples")
"""Keys of values, which are no schemas."""


def without_unknown_formats(schema: Any) -> Any:
    """A copy of a JSON schema without the formats that nobody here can enforce: to JSON Schema they are annotations.
    The schema is nested no deeper than Python's recursion goes."""
    if isinstance(schema, list):
        return [without_unknown_formats(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    cleaned: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            cleaned[key] = {name: without_unknown_formats(part) for name, part in value.items()}
        elif key in _DATA:
            cleaned[key] = value
        elif key != "format" or not isinstance(value, str) or value in FORMATS:
            cleaned[key] = without_unknown_formats(value)
    return cleaned

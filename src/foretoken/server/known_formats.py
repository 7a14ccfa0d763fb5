"""JSON spacing and string formats of schemas for llguidance."""

from __future__ import annotations

from typing import Any

SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as ``json.dumps`` writes it: with flexible white space a small model may write nothing else, and less is
forced."""
FORMATS = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"))
"""Formats that llguidance knows; it refuses a schema with any other."""
_NAMED = ("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions")
"""Keys whose members are schemas under arbitrary names: a property may be called ``format``."""


def without_unknown_formats(schema: Any) -> Any:
    """Copy of a JSON schema without formats that cannot be enforced, which JSON Schema treats as annotations.  The
    nesting must not exceed Python's recursion limit."""
    if isinstance(schema, list):
        return [without_unknown_formats(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    cleaned: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            cleaned[key] = {name: without_unknown_formats(part) for name, part in value.items()}
        elif key in ("const", "enum", "default", "example", "examples"):  # plain values, no schemas
            cleaned[key] = value
        elif key != "format" or not isinstance(value, str) or value in FORMATS:
            cleaned[key] = without_unknown_formats(value)
    return cleaned

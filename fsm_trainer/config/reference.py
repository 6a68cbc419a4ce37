"""What is published about the settings, made from the definition: the JSON Schema and the table in docs/.

`python -m fsm_trainer.config.reference` rewrites both files; a test keeps them current.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from fsm_trainer.config.errors import flag
from fsm_trainer.config.groups import GROUPS, MAPPED
from fsm_trainer.config.train_config import TrainConfig

SCHEMA_FILE = "schemas/train_config.json"
TABLE_FILE = "docs/configuration.md"
_BEGIN, _END = "<!-- settings: begin (generated) -->", "<!-- settings: end -->"


def json_schema() -> str:
    """JSON Schema of `config.json` and of a `--config` file's snake-case keys."""
    schema = TrainConfig.model_json_schema()
    properties: dict[str, Any] = schema["properties"]
    ordered: dict[str, Any] = {}
    for title, group in GROUPS.items():
        for name in group.model_fields:
            ordered[name] = {**properties[name], "x-group": title, "x-flag": flag(name)}
    schema.update(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "fsm_trainer run configuration",
            "description": "Settings of one run, as in its config.json.",
            "properties": ordered,
        }
    )
    return json.dumps(schema, indent=2) + "\n"


def choices(field: FieldInfo) -> tuple[str, ...]:
    """Allowed texts of a setting that has a fixed set of them."""
    if isinstance(field.json_schema_extra, dict) and "enum" in field.json_schema_extra:
        return tuple(map(str, cast("list[str]", field.json_schema_extra["enum"])))
    for part in (field.annotation, *get_args(field.annotation)):
        if get_origin(part) is Literal:
            return tuple(str(choice) for choice in get_args(part))
    return ()


def bounds(field: FieldInfo) -> str:
    """Bounds in words, such as `>= 1`."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = []
    for constraint in field.metadata:
        for attribute, sign in signs.items():
            value = getattr(constraint, attribute, None)
            if value is not None:
                found.append(f"{sign} {value:g}" if value < 10**6 else f"{sign} {value}")
    return ", ".join(found)


def default_text(field: FieldInfo) -> str:
    """Default in the spelling of a flag; empty where there is none."""
    if field.default is None:
        return ""
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)


def kind(field: FieldInfo) -> str:
    """Type in words: the choices, or whole number, number, true or false, text."""
    if choices(field):
        return "one of " + ", ".join(choices(field))
    types = {part for part in (field.annotation, *get_args(field.annotation)) if isinstance(part, type)}
    for known, words in ((bool, "true or false"), (int, "whole number"), (float, "number")):
        if known in types:
            return words
    return "text"


def settings_table() -> str:
    """Markdown tables, one a group."""
    lines: list[str] = []
    for title, group in GROUPS.items():
        lines += [f"### {title}", "", f"{group.__doc__}", ""]
        lines += ["| flag | default | type and bounds | meaning |", "|---|---|---|---|"]
        for name, field in group.model_fields.items():
            shape = "KEY=VALUE" if name in MAPPED else ", ".join(filter(None, (kind(field), bounds(field))))
            default = f"`{default_text(field)}`" if default_text(field) else ""
            lines.append(f"| `{flag(name)}` | {default} | {shape} | {field.description} |")
        lines.append("")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """`page` with the generated part between its two marks renewed."""
    before, rest = page.split(_BEGIN)
    return f"{before}{_BEGIN}\n\n{settings_table()}\n{_END}{rest.split(_END)[1]}"


def write(root: Path) -> None:
    """Rewrite schema and table below the repository's root."""
    (root / SCHEMA_FILE).write_text(json_schema(), encoding="utf-8")
    page = root / TABLE_FILE
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[2])

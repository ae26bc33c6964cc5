"""The JSON schema of descriptions of graphs: what may be in a file, for editors and checks."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch import Tensor

from pcnet.functions import registry
from pcnet.model.node import Node
from pcnet.model.schedule import Act, Every, Schedule
from pcnet.model.specification import FORMAT, LINKS, SCHEDULES, default_of, is_function, parts_of
from pcnet.settings import KINDS

PLAIN: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


def schema() -> dict[str, Any]:
    """A JSON schema of descriptions, with all kinds that are known now."""
    numbers = {"anyOf": [{"type": "number"}, {"type": "array", "items": {"$ref": "#/$defs/numbers"}}]}
    made = [
        {"type": "object", "properties": {name: {"type": "object"}}, "required": [name], "additionalProperties": False}
        for name in registry.makers()
    ]
    defs: dict[str, Any] = {"numbers": numbers, "function": {"anyOf": [{"enum": registry.names()}, *made]}}
    nodes = []
    for name, kinds in sorted(KINDS.items()):
        kind: Any = kinds[0]
        if inspect.isabstract(kind) or kind in (Act, Every, Schedule):
            continue
        is_node = issubclass(kind, Node)
        hints = get_type_hints(kind, include_extras=True)
        fields = [field for field in dataclasses.fields(kind) if not (is_node and field.name == "name")]
        required = [f.name for f in fields if _required(f)]
        properties = {f.name: _schema_of(hints[f.name]) for f in fields}
        defs[name] = {
            "type": "object",
            "description": inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " "),
            "properties": {"kind": {"const": name}} | properties,
            "required": ["kind", *required],
            "additionalProperties": False,
        }
        if is_node:
            nodes.append({"$ref": f"#/$defs/{name}"})
    pair = {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2}
    extra: dict[str, dict[str, Any]] = {
        "predicts": {"via": {"$ref": "#/$defs/function"}},
        "parametrises": {"of": {"type": "string"}},
    }
    links = [
        {
            "type": "object",
            "properties": {kind: pair} | extra.get(kind, {}),
            "required": [kind],
            "additionalProperties": False,
        }
        for kind in LINKS
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A graph of pcnet",
        "type": "object",
        "properties": {
            "pcnet": {"const": FORMAT},
            "nodes": {"type": "object", "additionalProperties": {"anyOf": nodes}},
            "links": {"type": "array", "items": {"anyOf": links}},
            "schedule": _schedule_schema(),
        },
        "required": ["nodes", "links"],
        "additionalProperties": False,
        "$defs": defs,
    }


def _required(field: Any) -> bool:
    default = default_of(field)
    return default is dataclasses.MISSING or type(default).__name__ == "PydanticUndefinedType"


def _schedule_schema() -> dict[str, Any]:
    texts = {"type": "array", "items": {"type": "string"}}
    options = {"every": {"$ref": "#/$defs/numbers"}, "warmup": {"enum": ["none", "doubling"]}, "exclude": texts}
    options |= {"repeats": {"type": "integer", "minimum": 1}}
    acts = [
        {"type": "object", "properties": {verb: texts} | options, "required": [verb], "additionalProperties": False}
        for verb in get_args(get_type_hints(Act)["action"])
    ]
    several = {"type": "array", "items": {"anyOf": acts}}
    whole_one = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "acts": several, "on_start": several, "on_end": several},
        "required": ["acts"],
        "additionalProperties": False,
    }
    called = [
        {
            "type": "object",
            "properties": {name: {"type": ["object", "null"]}},
            "required": [name],
            "additionalProperties": False,
        }
        for name in SCHEDULES
    ]
    return {"anyOf": [{"enum": list(SCHEDULES)}, *called, whole_one]}


def _schema_of(hint: Any) -> dict[str, Any]:
    if is_function(hint):
        return {"$ref": "#/$defs/function"}
    options: list[dict[str, Any]] = []
    for part in parts_of(hint):
        if part is Tensor:
            options.append({"$ref": "#/$defs/numbers"})
        elif get_origin(part) is Literal:
            options.append({"enum": list(get_args(part))})
        elif part in PLAIN:
            options.append({"type": PLAIN[part]})
        elif get_origin(part) is tuple:
            options.append({"type": "array", "items": _schema_of(get_args(part)[0])})
        elif isinstance(part, type):
            fitting = [
                name for name, kinds in KINDS.items() if issubclass(kinds[0], part) and not inspect.isabstract(kinds[0])
            ]
            options += [{"$ref": f"#/$defs/{name}"} for name in sorted(fitting)]
    return options[0] if len(options) == 1 else {"anyOf": options} if options else {}

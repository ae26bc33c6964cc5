"""Model files: load and save as YAML or JSON, their JSON schema, and drawings."""

import dataclasses
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from torch import Tensor

from pcnet.errors import GraphError, SpecificationError
from pcnet.files import atomic_write, path_of
from pcnet.functions import registry
from pcnet.io.strict_yaml import read
from pcnet.model.graph import Graph
from pcnet.model.hypotheses import Hypotheses
from pcnet.model.links import Link
from pcnet.model.model import Model
from pcnet.model.node import Node
from pcnet.model.schedule import Act, Every, Schedule
from pcnet.model.specification import ACTIONS, FORMAT, SCHEDULES, default_of, from_spec, is_function, parts_of, to_spec
from pcnet.settings import KINDS

COLOURS = {"state": "#56B4E9", "sensory": "#E69F00", "parameter": "#009E73", "precision": "#CC79A7"}
"""Colours of nodes by role; others are grey."""
STYLES = {"-": "solid", "--": "dashed", ":": "dotted"}
IMAGES = (".png", ".svg", ".pdf")
TYPES: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


def load_model(source: Mapping[str, Any] | str | Path) -> Model:
    """Load a model from a YAML or JSON file, or from the same as plain data; see `pcnet.model.specification`.

    Raises:
        SpecificationError: With the file and the place of the mistake.
    """
    if not isinstance(source, (str, Path)):
        return from_spec(source)
    data = read(source)
    try:
        return from_spec(data)
    except SpecificationError as error:
        raise SpecificationError(f"{str(source)!r}: {error}") from None


def save_model(path: str | Path, model: Model) -> Path:
    """Save a model to a JSON file if the path ends in .json, else to a YAML file; returns the path.

    Raises:
        SpecificationError: If a function has no name; see `pcnet.register`.
    """
    path, spec = path_of(path, SpecificationError), to_spec(model)
    if path.suffix == ".json":
        text = json.dumps(spec, indent=1, allow_nan=False) + "\n"
    else:
        text = yaml.safe_dump(spec, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    with atomic_write(path, SpecificationError) as file:
        file.write(text.encode())
    return path


def save_drawing(path: Path, model: Model) -> Path:
    """Save a drawing of a model as an image (.png, .svg, .pdf) or as text for Graphviz (.dot); returns the path."""
    from matplotlib.figure import Figure

    if path.suffix not in (*IMAGES, ".dot"):
        raise GraphError(f"{str(path)!r}: a drawing must end in {', '.join((*IMAGES, '.dot'))}")
    with atomic_write(path, GraphError) as file:
        if path.suffix == ".dot":
            file.write(to_dot(model.graph).encode())
        else:
            figure = model.graph.draw(model.schedule).get_figure()
            assert isinstance(figure, Figure)
            figure.savefig(file, format=path.suffix[1:], dpi=200, bbox_inches="tight")
    return path


def to_dot(graph: Graph) -> str:
    """A graph in the language of Graphviz."""
    lines = ["digraph pcnet {", "  node [shape=box, style=filled];"]
    for name, node in graph.nodes.items():
        colour = COLOURS.get(node.role, "#BBBBBB")
        lines.append(f'  {_quoted(name)} [label={_quoted(f"{name}: {node.describe()}")}, fillcolor="{colour}"];')
    for link in graph.links:
        label = link.key if link.of is None else f"{link.key} of {link.of.name}"
        ends = f"{_quoted(link.parent.name)} -> {_quoted(link.child.name)}"
        lines.append(f"  {ends} [label={_quoted(label)}, style={STYLES[link.style.dash]}];")
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


# --- JSON schema ----------------------------------------------------------------------------------------------------
def json_schema() -> dict[str, Any]:
    """The JSON schema of model files, with all kinds and functions that are known now."""
    numbers = {"anyOf": [{"type": "number"}, {"type": "array", "items": {"$ref": "#/$defs/numbers"}}]}
    factories = [_object({name: {"type": "object"}}, name) for name in registry.FACTORIES]
    function = {"anyOf": [{"enum": sorted(registry.FUNCTIONS)}, *factories]}
    defs: dict[str, Any] = {"numbers": numbers, "function": function}
    nodes = []
    for name, (kind, *_) in sorted(KINDS.items()):
        if inspect.isabstract(kind) or kind in (Act, Every, Schedule):
            continue
        hints, fields = get_type_hints(kind, include_extras=True), dataclasses.fields(kind)
        if issubclass(kind, Node):
            fields = tuple(field for field in fields if field.name != "name")
            nodes.append({"$ref": f"#/$defs/{name}"})
        properties = {"kind": {"const": name}} | {field.name: _schema_of(hints[field.name]) for field in fields}
        defs[name] = _object(
            properties, "kind", *(field.name for field in fields if default_of(field) is dataclasses.MISSING)
        )
        defs[name]["description"] = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    pair = {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2}
    links = [_object({key: pair} | dict(kind.option_schema), key) for key, kind in Link.kinds.items()]
    properties = {
        "pcnet": {"const": FORMAT},
        "nodes": {"type": "object", "additionalProperties": {"anyOf": nodes}},
        "links": {"type": "array", "items": {"anyOf": links}},
        "schedule": _schedule_schema(),
        "hypotheses": _without_kind(defs.pop(Hypotheses.__name__)),
    }
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A model of pcnet", "$defs": defs}
    return head | _object(properties, "nodes", "links")


def _without_kind(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object whose kind needs no name."""
    properties = {name: each for name, each in schema["properties"].items() if name != "kind"}
    return schema | {"properties": properties, "required": []}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """The schema of a mapping with these keys and no others."""
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def _schedule_schema() -> dict[str, Any]:
    names = {"type": "array", "items": {"type": "string"}}
    options = {"every": {"$ref": "#/$defs/numbers"}, "exclude": names}
    options |= {"repeats": {"type": "integer", "minimum": 1}}
    acts = {"type": "array", "items": {"anyOf": [_object({each: names} | options, each) for each in ACTIONS]}}
    written = _object({"name": {"type": "string"}, "acts": acts, "on_start": acts, "on_end": acts}, "acts")
    named = [_object({name: {"type": ["object", "null"]}}, name) for name in SCHEDULES]
    return {"anyOf": [{"enum": list(SCHEDULES)}, *named, written]}


def _schema_of(hint: Any) -> dict[str, Any]:
    """The schema of a setting, from its type."""
    if is_function(hint):
        return {"$ref": "#/$defs/function"}
    options: list[dict[str, Any]] = []
    for part in parts_of(hint):
        if part is Tensor:
            options.append({"$ref": "#/$defs/numbers"})
        elif get_origin(part) is Literal:
            options.append({"enum": list(get_args(part))})
        elif part in TYPES:
            options.append({"type": TYPES[part]})
        elif get_origin(part) is tuple:
            options.append({"type": "array", "items": _schema_of(get_args(part)[0])})
        elif isinstance(part, type):
            kinds = [name for name, (k, *_) in KINDS.items() if issubclass(k, part) and not inspect.isabstract(k)]
            options += [{"$ref": f"#/$defs/{name}"} for name in sorted(kinds)]
    return options[0] if len(options) == 1 else {"anyOf": options} if options else {}

"""Graphs and schedules as plain data: written to and read from YAML or JSON, strictly and without loss.

    nodes:
      x: {kind: GeneralisedStateNode, dim: 2, orders: 3, flow: {linear: {matrix: [[0, 1], [-1, 0]]}}}
      y: {kind: SensoryNode, dim: 2, orders: 2, dt: 0.1}
      noise_x: {kind: PrecisionNode, prior_precision: 10, sd: 0.1, correlation_time: 0.2}
      noise_y: {kind: PrecisionNode, prior_precision: 100, sd: 0.1, correlation_time: 0.2}
    links:
      - {predicts: [x, y]}
      - {weighs: [noise_x, x]}
      - {weighs: [noise_y, y]}
    schedule: {odem: {every: 64}}

Kinds are the classes that are declared by `pcnet.settings.settings`, by their names; keys are their settings, and those
that are left out have their defaults. Functions have the names of `pcnet.register`. A file imports nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import SkipValidation
from torch import Tensor

from pcnet.errors import PcnetError, SpecificationError
from pcnet.files import atomic_write
from pcnet.functions import registry
from pcnet.functions.closed_form import Identity
from pcnet.functions.registry import near
from pcnet.io.strict_yaml import read
from pcnet.model.graph import Graph
from pcnet.model.model import Model
from pcnet.model.node import AnyNode, Node
from pcnet.model.schedule import (
    Act,
    Every,
    LevelNodes,
    Schedule,
    adaptive_filtering,
    batch,
    generalised_filtering,
    odem,
    states_only,
)
from pcnet.settings import KINDS

FORMAT = 1
"""The version of the descriptions that are written."""
LINKS = ("predicts", "drives", "parametrises", "weighs")


def _adaptive_filtering(every: Any = 64, levels: Any = ({},), warmup: Literal["none", "doubling"] = "none") -> Schedule:
    """`adaptive_filtering` with levels as a file has them: [{states: [x], precisions: [noise], parameters: []}, …]."""
    if not isinstance(levels, (list, tuple)) or not levels:
        raise SpecificationError(
            "levels must be a list, such as [{states: [x], precisions: [noise_x], parameters: []}]"
        )
    made = []
    for number, level in enumerate(levels):
        _check(level, f"level {number}", LevelNodes._fields, ())
        for name, who in level.items():
            if not isinstance(who, list) or not all(isinstance(each, str) for each in who):
                raise SpecificationError(f"level {number}: {name} must be a list of nodes or roles")
        made.append(LevelNodes(**{name: tuple(who) for name, who in level.items()}))
    return adaptive_filtering(every, levels=made, warmup=warmup)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "odem": odem,
    "generalised_filtering": generalised_filtering,
    "states_only": states_only,
    "batch": batch,
    "adaptive_filtering": _adaptive_filtering,
}
"""Schedules that a file may call by name, with their arguments."""
DEEPEST = 40
"""How deep a description may be nested."""


# --- to plain data -----------------------------------------------------------------------------------------------
def describe(graph: Graph, schedule: Schedule | None = None) -> dict[str, Any]:
    """A graph and its schedule as plain data."""
    spec: dict[str, Any] = {"pcnet": FORMAT, "nodes": {}, "links": []}
    for name, node in graph.nodes.items():
        spec["nodes"][name] = {key: value for key, value in _part(node, repr(name)).items() if key != "name"}
    for link in graph.links:
        item: dict[str, Any] = {link.key: [link.parent.name, link.child.name]}
        if link.of is not None:
            item["of"] = link.of.name
        if link.key == "predicts" and link.function is not None and not isinstance(link.function, Identity):
            item["via"] = _named(link.function, f"{link.parent.name!r} to {link.child.name!r}")
        spec["links"].append(item)
    if schedule is not None:
        acts = {"acts": schedule.acts, "on_start": schedule.on_start}
        acts |= {"on_end": schedule.on_end} if schedule.on_end else {}
        spec["schedule"] = {"name": schedule.name} | {key: [_act(act) for act in part] for key, part in acts.items()}
    return spec


def _act(act: Act) -> dict[str, Any]:
    found: dict[str, Any] = {act.action: list(act.nodes)}
    if bool((act.clock.every != 1).any()):
        found["every"] = act.clock.every.tolist()
    if act.clock.warmup == "doubling":
        found["warmup"] = "doubling"
    if act.repeats != 1:
        found["repeats"] = act.repeats
    if act.exclude:
        found["exclude"] = list(act.exclude)
    return found


def _part(part: Any, where: str) -> dict[str, Any]:
    """A node, mover or kernel: its kind, and what of its settings is not as by default."""
    kind = type(part)
    if kind not in KINDS.get(kind.__name__, ()):
        raise SpecificationError(
            f"{where}: {kind.__name__} is not declared by pcnet.settings.settings, so that it has no spec"
        )
    found: dict[str, Any] = {"kind": kind.__name__}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if not _same(value, default_of(field)):
            found[field.name] = _plain(value, f"{where}, {field.name}")
    return found


def default_of(field: Any) -> Any:
    default = field.default
    if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return getattr(default, "default", default) if type(default).__name__ == "FieldInfo" else default


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(default, Tensor):
        both = isinstance(value, Tensor) and isinstance(default, Tensor)
        return both and value.shape == default.shape and bool((value == default).all())
    if dataclasses.is_dataclass(value):
        if type(value) is not type(default):
            return False
        return all(_same(getattr(value, f.name), getattr(default, f.name)) for f in dataclasses.fields(value))
    return type(value) is type(default) and bool(value == default)


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value):
        return _part(value, where)
    if isinstance(value, (tuple, list)):
        return [_plain(each, where) for each in value]
    if callable(value):
        return _named(value, where)
    raise SpecificationError(f"{where}: {value!r} cannot be written to a file")


def _named(function: Any, where: str) -> Any:
    try:
        return registry.describe(function)
    except PcnetError as error:
        raise SpecificationError(f"{where}: {error}") from None


# --- from plain data ---------------------------------------------------------------------------------------------
def load_model(spec: Mapping[str, Any] | str | Path) -> Model:
    """The graph and schedule that plain data, or a YAML or JSON file, describe; ODEM unless a schedule is given."""
    if isinstance(spec, (str, Path)):
        data = read(spec)
        try:
            return load_model(_mapping(data))
        except SpecificationError as error:
            raise SpecificationError(f"{str(spec)!r}: {error}") from None
    data = spec
    _check(data, "the description of a graph", ("pcnet", "nodes", "links", "schedule"), ("nodes", "links"))
    _shallow(data)
    version = data.get("pcnet", FORMAT)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise SpecificationError(f"pcnet is the version of the description, {FORMAT}, not {version!r}")
    if version > FORMAT:
        raise SpecificationError(f"the description has version {version}; this pcnet reads up to {FORMAT}")
    if not isinstance(data["nodes"], Mapping) or not isinstance(data["links"], list):
        raise SpecificationError("nodes must be a mapping from names to settings, and links a list")
    nodes = {str(name): _node(name, settings) for name, settings in data["nodes"].items()}
    graph = Graph()
    for number, link in enumerate(data["links"]):
        _link(graph, nodes, link, f"link {number}")
    loose = [name for name in nodes if name not in graph.nodes]
    if loose:
        raise SpecificationError(f"the node {loose[0]!r} has no links")
    try:
        return Model(graph, _schedule(data["schedule"]) if "schedule" in data else odem())
    except SpecificationError:
        raise
    except PcnetError as error:
        raise SpecificationError(f"schedule: {error}") from None


def _mapping(data: Any) -> Mapping[str, Any]:
    """What was read, if it can be a description at all."""
    if not isinstance(data, Mapping):
        raise SpecificationError(f"the description of a graph must be a mapping, not {_short(data)}")
    return data


def save_model(path: str | Path, graph: Graph, schedule: Schedule | None = None) -> Path:
    """Write a graph and its schedule to a YAML or JSON file, by its ending, whole or not at all."""
    path, spec = Path(path), describe(graph, schedule)
    if not path.parent.is_dir():
        raise SpecificationError(f"there is no folder {str(path.parent)!r} to save into")
    with atomic_write(path) as scratch:
        if path.suffix == ".json":
            scratch.write_text(json.dumps(spec, indent=1, allow_nan=False) + "\n")
        else:
            text = yaml.safe_dump(spec, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
            scratch.write_text(text, encoding="utf-8")
    return path


def _node(name: Any, settings: Any) -> AnyNode:
    if not isinstance(name, str):
        raise SpecificationError(f"the name of a node must be text, not {name!r}")
    made = _make(settings, Node, f"node {name!r}", {"name": name})
    assert isinstance(made, Node)
    return made


def _make(given: Any, base: type, where: str, own: Mapping[str, Any] | None = None) -> Any:
    """A part of the kind that is asked for, if it is one that fits."""
    if not isinstance(given, Mapping) or not isinstance(given.get("kind"), str):
        raise SpecificationError(
            f"{where}: give a mapping with a kind, such as {{kind: {_example(base)}}}, not {_short(given)}"
        )
    kind = _kind(given["kind"], base, where)
    hints = get_type_hints(kind, include_extras=True)
    known = [field.name for field in dataclasses.fields(kind) if field.name not in (own or {})]
    settings: dict[str, Any] = dict(own or {})
    for key, value in given.items():
        if key == "kind":
            continue
        if key not in known:
            raise SpecificationError(f"{where}: unknown key {key!r}; {near(str(key), known)}")
        settings[key] = _value(value, hints[key], f"{where}, {key}")
    try:
        return kind(**settings)
    except PcnetError as error:
        raise SpecificationError(f"{where}: {error}") from None


def _value(value: Any, hint: Any, where: str) -> Any:
    if is_function(hint):
        try:
            return registry.find(value)
        except PcnetError as error:
            raise SpecificationError(f"{where}: {error}") from None
    if isinstance(value, Mapping):
        bases = [part for part in parts_of(hint) if isinstance(part, type) and part not in (Tensor, float, int, str)]
        if not bases:
            raise SpecificationError(f"{where}: a mapping makes no sense here")
        return _make(value, bases[0], where)
    return value


def _kind(name: str, base: type, where: str) -> Any:
    fitting = {each: kinds for each, kinds in KINDS.items() if any(issubclass(kind, base) for kind in kinds)}
    if name not in fitting:
        raise SpecificationError(f"{where}: there is no kind {name!r} that fits here; {near(name, fitting)}")
    kinds = [kind for kind in fitting[name] if issubclass(kind, base)]
    if len(kinds) > 1:
        raise SpecificationError(
            f"{where}: there are {len(kinds)} kinds {name!r}, of {', '.join(k.__module__ for k in kinds)}"
        )
    if inspect.isabstract(kinds[0]):
        raise SpecificationError(f"{where}: {name} is what its kinds have in common, and none by itself")
    return kinds[0]


def _link(graph: Graph, nodes: Mapping[str, AnyNode], link: Any, where: str) -> None:
    _check(link, where, (*LINKS, "of", "via"), ())
    kinds = [kind for kind in LINKS if kind in link]
    if len(kinds) != 1:
        raise SpecificationError(
            f"{where}: give one of {', '.join(LINKS)}, such as {{predicts: [x, y]}}, not {_short(link)}"
        )
    (kind,) = kinds
    ends = link[kind]
    if not isinstance(ends, list) or len(ends) != 2:
        raise SpecificationError(f"{where}: {kind} takes the names of two nodes, from above, not {_short(ends)}")
    named = [*ends, *([link["of"]] if "of" in link else [])]
    for name in named:
        if not isinstance(name, str) or name not in nodes:
            raise SpecificationError(f"{where}: there is no node {name!r}; {near(str(name), nodes)}")
    if "of" in link and kind != "parametrises":
        raise SpecificationError(f"{where}: of goes with parametrises, not with {kind}")
    if "via" in link and kind != "predicts":
        raise SpecificationError(f"{where}: via goes with predicts, not with {kind}")
    options: dict[str, Any] = {}
    try:
        if "of" in link:
            options["of"] = nodes[link["of"]]
        if "via" in link:
            options["via"] = registry.find(link["via"])
        getattr(graph, kind)(nodes[ends[0]], nodes[ends[1]], **options)
    except PcnetError as error:
        raise SpecificationError(f"{where}: {error}") from None


def _schedule(given: Any) -> Schedule:
    if isinstance(given, str):
        given = {given: {}}
    if isinstance(given, Mapping) and len(given) == 1 and next(iter(given)) in SCHEDULES:
        ((name, options),) = given.items()
        known = inspect.signature(SCHEDULES[name]).parameters
        _check(options if options is not None else {}, f"schedule {name}", tuple(known), ())
        try:
            return SCHEDULES[name](**(options or {}))
        except (TypeError, ValueError) as error:
            raise SpecificationError(f"schedule {name}: {error}") from None
    if isinstance(given, Mapping) and len(given) == 1 and "acts" not in given:
        raise SpecificationError(
            f"there is no schedule {next(iter(given))!r}; {near(str(next(iter(given))), [*SCHEDULES, 'acts'])}"
        )
    _check(given, "schedule", ("name", "acts", "on_start", "on_end"), ("acts",))
    for part in ("acts", "on_start", "on_end"):
        if not isinstance(given.get(part, []), list):
            raise SpecificationError(f"schedule, {part}: give a list, such as [{{observe: [sensory]}}]")
    return Schedule(
        tuple(_read_act(act, f"schedule, act {i}") for i, act in enumerate(given["acts"])),
        tuple(_read_act(act, f"schedule, on_start {i}") for i, act in enumerate(given.get("on_start", []))),
        given.get("name", "schedule"),
        tuple(_read_act(act, f"schedule, on_end {i}") for i, act in enumerate(given.get("on_end", []))),
    )


def _read_act(given: Any, where: str) -> Act:
    verbs = get_args(get_type_hints(Act)["action"])
    _check(given, where, (*verbs, "every", "warmup", "repeats", "exclude"), ())
    chosen = [verb for verb in verbs if verb in given]
    if len(chosen) != 1 or not isinstance(given[chosen[0]], list):
        raise SpecificationError(f"{where}: give one action with a list of nodes or roles, such as {{update: [state]}}")
    clock = Every(given.get("every", 1), given.get("warmup", "none"))
    return Act(chosen[0], tuple(given[chosen[0]]), clock, given.get("repeats", 1), tuple(given.get("exclude", ())))


def _check(given: Any, where: str, known: tuple[str, ...], needed: tuple[str, ...]) -> None:
    if not isinstance(given, Mapping):
        raise SpecificationError(f"{where} must be a mapping, not {_short(given)}")
    for key in given:
        if key not in known:
            raise SpecificationError(f"{where}: unknown key {key!r}; {near(str(key), known)}")
    for key in needed:
        if key not in given:
            raise SpecificationError(f"{where}: {key!r} is missing")


def _shallow(data: Any, depth: int = 0) -> None:
    """Refuse what is nested too deeply, or holds numbers that are none."""
    if depth > DEEPEST:
        raise SpecificationError(f"the description is nested more than {DEEPEST} deep")
    if isinstance(data, Mapping):
        for value in data.values():
            _shallow(value, depth + 1)
    elif isinstance(data, (list, tuple)):
        for value in data:
            _shallow(value, depth + 1)
    elif isinstance(data, float) and not math.isfinite(data):
        raise SpecificationError("numbers in a description must be finite")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "…"


def _example(base: type) -> str:
    found = [
        name for name, kinds in KINDS.items() if any(issubclass(k, base) and not inspect.isabstract(k) for k in kinds)
    ]
    return found[0] if found else "…"


# --- what a setting may be ------------------------------------------------------------------------------------------
def is_function(hint: Any) -> bool:
    """Whether a setting is a function: those are not validated by their type."""
    return any(type(part).__name__ == SkipValidation.__name__ for part in getattr(hint, "__metadata__", ()))


def parts_of(hint: Any) -> list[Any]:
    """The types that a setting may be of."""
    if get_origin(hint) is Annotated:
        return parts_of(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [part for each in get_args(hint) for part in parts_of(each)]
    return [hint]

"""Models as plain data: mappings, lists, numbers and text, read strictly and written without loss.

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

Kinds are the names of classes decorated with `pcnet.settings.settings`, keys are their settings. Settings with default
values may be left out. Functions are given by the names of `pcnet.register`. Nothing is imported.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import SkipValidation
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from torch import Tensor

from pcnet.errors import PcnetError, SpecificationError, suggestion
from pcnet.functions import registry
from pcnet.model import schedule as schedules
from pcnet.model.graph import Graph
from pcnet.model.hypotheses import Hypotheses
from pcnet.model.links import Link
from pcnet.model.model import Model
from pcnet.model.node import AnyNode, Node
from pcnet.model.schedule import Act, Every, LevelNodes, Schedule
from pcnet.settings import KINDS

FORMAT = 1  # version of the format
ACTIONS: tuple[str, ...] = get_args(get_type_hints(Act)["action"])
MAX_DEPTH = 40  # deepest nesting that is read
LARGEST = 2**53  # largest whole number that is read


def _adaptive_filtering(every: Any = 64, levels: Any = ({},), learn_every: Any = 1) -> Schedule:
    """`adaptive_filtering` with levels as mappings: [{states: [x], precisions: [noise], parameters: []}, …]."""
    if not isinstance(levels, (list, tuple)) or not levels:
        raise SpecificationError("levels must be a list, such as [{states: [x], precisions: [noise_x]}]")
    for number, level in enumerate(levels):
        _check_keys(level, f"level {number}", LevelNodes._fields)
        for name, nodes in level.items():
            if not isinstance(nodes, list) or not all(isinstance(each, str) for each in nodes):
                raise SpecificationError(f"level {number}: {name} must be a list of nodes or roles")
    made = [LevelNodes(**{name: tuple(nodes) for name, nodes in level.items()}) for level in levels]
    return schedules.adaptive_filtering(every, levels=made, learn_every=learn_every)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "odem": schedules.odem,
    "generalised_filtering": schedules.generalised_filtering,
    "states_only": schedules.states_only,
    "batch": schedules.batch,
    "adaptive_filtering": _adaptive_filtering,
}
"""Schedules that may be given by name, with their arguments."""


def to_spec(model: Model) -> dict[str, Any]:
    """A model as plain data; its functions must have names, and its classes be decorated with `settings`."""
    graph, schedule = model.graph, model.schedule
    nodes = {name: _part(node, repr(name)) for name, node in graph.nodes.items()}
    for part in nodes.values():
        del part["name"]
    links = []
    for link in graph.links:
        ends: dict[str, Any] = {link.key: [link.parent.name, link.child.name]}
        links.append(ends | link.to_spec(partial(_plain, where=repr(link))))
    acts = {"acts": schedule.acts, "on_start": schedule.on_start}
    acts |= {"on_end": schedule.on_end} if schedule.on_end else {}
    steps = {"name": schedule.name} | {key: [_act(act) for act in part] for key, part in acts.items()}
    found: dict[str, Any] = {"pcnet": FORMAT, "nodes": nodes, "links": links, "schedule": steps}
    if model.hypotheses is not None:
        part = _part(model.hypotheses, "hypotheses")
        found["hypotheses"] = {name: value for name, value in part.items() if name != "kind"}
    return found


def _act(act: Act) -> dict[str, Any]:
    found: dict[str, Any] = {act.action: list(act.nodes)}
    found |= {"every": act.clock.every.tolist()} if bool((act.clock.every != 1).any()) else {}
    plain = {"repeats": act.repeats, "exclude": list(act.exclude)}
    return found | {name: value for name, value in plain.items() if value not in (1, [])}


def _part(part: Any, where: str) -> dict[str, Any]:
    """The kind of a node, integrator, estimator or kernel, and its settings that differ from their defaults."""
    kind = type(part)
    if kind not in KINDS.get(kind.__name__, ()):
        raise SpecificationError(f"{where}: decorate {kind.__name__} with pcnet.settings.settings")
    found: dict[str, Any] = {"kind": kind.__name__}
    for field in dataclasses.fields(part):
        value, default, place = getattr(part, field.name), default_of(field), f"{where}, {field.name}"
        if value is not default:
            plain = _plain(value, place)
            if default is dataclasses.MISSING or plain != _plain(default, place):
                found[field.name] = plain
    return found


def default_of(field: Any) -> Any:
    """The default of a dataclass field; MISSING if it is required."""
    default = field.default
    if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if isinstance(default, FieldInfo):
        default = default.default
    return dataclasses.MISSING if default is PydanticUndefined else default


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value):
        return _part(value, where)
    if isinstance(value, (tuple, list)):
        return [_plain(each, where) for each in value]
    with _at(where):
        return registry.to_spec(value)


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Turn errors into SpecificationErrors that name the place."""
    try:
        yield
    except SpecificationError:
        raise
    except (PcnetError, TypeError, ValueError, RuntimeError, LookupError, ArithmeticError, AttributeError) as error:
        raise SpecificationError(f"{where}: {error}") from None


def from_spec(spec: Mapping[str, Any]) -> Model:
    """The model that plain data specify; without a schedule, the one that fits its nodes."""
    known = ("pcnet", "nodes", "links", "schedule", "hypotheses")
    _check_keys(spec, "the specification of a model", known, ("nodes", "links"))
    _check_values(spec)
    version = spec.get("pcnet", FORMAT)
    if isinstance(version, bool) or version not in range(1, FORMAT + 1):
        raise SpecificationError(f"pcnet is format version {version!r}; this pcnet reads up to {FORMAT}")
    if not isinstance(spec["nodes"], Mapping) or not isinstance(spec["links"], list):
        raise SpecificationError("nodes must be a mapping from names to settings, and links a list")
    nodes = {}
    for name, given in spec["nodes"].items():
        if not isinstance(name, str):
            raise SpecificationError(f"the name of a node must be text, not {name!r}")
        nodes[name] = _make(given, Node, f"node {name!r}", {"name": name})
    graph = Graph()
    for number, link in enumerate(spec["links"]):
        _add_link(graph, nodes, link, f"link {number}")
    for name in nodes:
        if name not in graph.nodes:
            raise SpecificationError(f"the node {name!r} has no links")
    if not isinstance(spec.get("hypotheses"), Mapping | None):
        raise SpecificationError(f"hypotheses must be a mapping, not {_short(spec['hypotheses'])}")
    hypotheses = None
    if spec.get("hypotheses") is not None:
        hypotheses = _make({"kind": Hypotheses.__name__, **spec["hypotheses"]}, Hypotheses, "hypotheses")
    with _at("schedule"):
        return Model(graph, _schedule(spec["schedule"]) if "schedule" in spec else None, hypotheses)


def _make(given: Any, base: type, where: str, extra: Mapping[str, Any] | None = None) -> Any:
    """An object of the given kind, which must be a subclass of `base`; `extra` settings are not in the data."""
    kinds = {name: [k for k in each if issubclass(k, base)] for name, each in KINDS.items()}
    kinds = {name: each for name, each in kinds.items() if each}
    if not isinstance(given, Mapping) or not isinstance(given.get("kind"), str):
        example = next((name for name, (kind, *_) in kinds.items() if not inspect.isabstract(kind)), "…")
        raise SpecificationError(f"{where}: give a mapping with a kind, {{kind: {example}}}, not {_short(given)}")
    name, settings = given["kind"], dict(extra or {})
    if name not in kinds:
        raise SpecificationError(f"{where}: there is no kind {name!r} that fits here; {suggestion(name, kinds)}")
    kind, *others = kinds[name]
    if others:
        modules = ", ".join(each.__module__ for each in kinds[name])
        raise SpecificationError(f"{where}: there are {len(kinds[name])} kinds {name!r}, in {modules}; rename one")
    if inspect.isabstract(kind):
        raise SpecificationError(f"{where}: {name} is abstract; use a kind that is derived from it")
    hints = get_type_hints(kind, include_extras=True)
    known: Any = [field.name for field in dataclasses.fields(kind) if field.name not in settings]  # type: ignore[arg-type]
    _check_keys(given, where, ("kind", *known))
    for key in given:
        if key != "kind":
            settings[key] = _value(given[key], hints[key], f"{where}, {key}")
    with _at(where):
        return kind(**settings)


def _value(value: Any, hint: Any, where: str) -> Any:
    """The value of a setting: functions and nested objects are made, anything else is left to validation."""
    if is_function(hint):
        with _at(where):
            return registry.from_spec(value)
    if isinstance(value, Mapping):
        bases = [part for part in parts_of(hint) if isinstance(part, type) and part not in (Tensor, float, int, str)]
        if not bases:
            raise SpecificationError(f"{where}: a mapping is not allowed here")
        return _make(value, bases[0], where)
    return value


def _add_link(graph: Graph, nodes: Mapping[str, AnyNode], given: Any, where: str) -> None:
    owners = {option: key for key, kind in reversed(Link.kinds.items()) for option in kind.option_schema}
    _check_keys(given, where, (*Link.kinds, *owners))
    keys = [key for key in Link.kinds if key in given]
    if len(keys) != 1:
        example = "such as {predicts: [x, y]}"
        raise SpecificationError(f"{where}: give one of {', '.join(Link.kinds)}, {example}, not {_short(given)}")
    (key,) = keys
    ends, options = given[key], {option: given[option] for option in owners if option in given}
    if not isinstance(ends, list) or len(ends) != 2:
        raise SpecificationError(f"{where}: {key} takes the names of two nodes, parent first, not {_short(ends)}")
    for option in options:
        if option not in Link.kinds[key].option_schema:
            raise SpecificationError(f"{where}: {option} goes with {owners[option]}, not with {key}")
    for name in [*ends, *([options["of"]] if "of" in options else [])]:
        if not isinstance(name, str) or name not in nodes:
            raise SpecificationError(f"{where}: there is no node {name!r}; {suggestion(name, nodes)}")
    with _at(where):
        made = Link.kinds[key].from_spec(options, nodes, registry.from_spec)
        graph.connect(Link.kinds[key](nodes[ends[0]], nodes[ends[1]], **made))


def _schedule(given: Any) -> Schedule:
    if isinstance(given, str):
        given = {given: {}}
    if isinstance(given, Mapping) and len(given) == 1 and "acts" not in given:
        ((name, options),) = given.items()
        if name not in SCHEDULES:
            raise SpecificationError(f"there is no schedule {name!r}; {suggestion(name, [*SCHEDULES, 'acts'])}")
        options = {} if options is None else options
        _check_keys(options, f"schedule {name}", inspect.signature(SCHEDULES[name]).parameters)
        with _at(f"schedule {name}"):
            return SCHEDULES[name](**options)
    _check_keys(given, "schedule", ("name", "acts", "on_start", "on_end"), ("acts",))
    parts: dict[str, Any] = {"name": given.get("name", "schedule")}
    for part in ("acts", "on_start", "on_end"):
        acts = given.get(part, [])
        if not isinstance(acts, list):
            raise SpecificationError(f"schedule, {part}: give a list, such as [{{observe: [sensory]}}]")
        parts[part] = tuple(_read_act(act, f"schedule, {part} {i}") for i, act in enumerate(acts))
    return Schedule(**parts)


def _read_act(given: Any, where: str) -> Act:
    _check_keys(given, where, (*ACTIONS, "every", "repeats", "exclude"))
    chosen: Any = [action for action in ACTIONS if action in given]
    if len(chosen) != 1 or not all(isinstance(given.get(key, []), list) for key in (*chosen, "exclude")):
        raise SpecificationError(f"{where}: give one action with a list of nodes or roles, such as {{update: [state]}}")
    clock = Every(given.get("every", 1))
    return Act(chosen[0], tuple(given[chosen[0]]), clock, given.get("repeats", 1), tuple(given.get("exclude", ())))


def _check_keys(given: Any, where: str, known: Iterable[str], needed: Iterable[str] = ()) -> None:
    if not isinstance(given, Mapping):
        raise SpecificationError(f"{where} must be a mapping, not {_short(given)}")
    for key in given:
        if key not in known:
            raise SpecificationError(f"{where}: unknown key {key!r}; {suggestion(key, known)}")
    for key in needed:
        if key not in given:
            raise SpecificationError(f"{where}: {key!r} is missing")


def _check_values(data: Any, depth: int = 0) -> None:
    """Raise SpecificationError for data that are nested too deeply or contain numbers that are not finite."""
    if depth > MAX_DEPTH:
        raise SpecificationError(f"the specification is nested more than {MAX_DEPTH} deep")
    if isinstance(data, (Mapping, list, tuple)):
        for value in data.values() if isinstance(data, Mapping) else data:
            _check_values(value, depth + 1)
    elif isinstance(data, float) and not math.isfinite(data):
        raise SpecificationError("numbers in a specification must be finite")
    elif isinstance(data, int) and abs(data) > LARGEST:
        raise SpecificationError("a whole number in the specification is too large")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "…"


def is_function(hint: Any) -> bool:
    """Whether a setting is a function; its type is annotated with SkipValidation."""
    return any(type(part).__name__ == SkipValidation.__name__ for part in getattr(hint, "__metadata__", ()))


def parts_of(hint: Any) -> list[Any]:
    """The alternatives of the type of a setting, without annotations."""
    if get_origin(hint) is Annotated:
        return parts_of(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [part for each in get_args(hint) for part in parts_of(each)]
    return [hint]

"""Models as plain data and files: exact round trips, and strict validation."""

import copy
import dataclasses
import inspect
import json
import math
import time

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pcnet as pc
from pcnet.errors import PcnetError, SettingError, SpecificationError
from pcnet.functions import registry
from pcnet.graphs import odem
from pcnet.io.model_files import json_schema
from pcnet.io.strict_yaml import Loader, parse
from pcnet.model.node import Node
from pcnet.model.schedule import LevelNodes, adaptive_filtering
from pcnet.model.specification import from_spec, to_spec
from pcnet.nodes import GeneralisedStateNode, KalmanStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.estimators import (
    Averaging,
    Exponential,
    Newton,
    NoiseScoring,
    ParameterEstimator,
    RobbinsMonro,
    WindowMean,
)
from pcnet.numerics.integrators import StateIntegrator
from pcnet.numerics.kernels import Autocorrelation, Kernel, Matern
from pcnet.settings import KINDS, Positive, number
from pcnet.settings import settings as declared
from support import cases
from support.cases import stack
from support.compare import same
from support.mutations import mutated_specifications


@pc.register("test: pendulum")
def pendulum(x, theta):
    return torch.stack([x[..., 1], -theta[..., 0] * torch.sin(x[..., 0])], -1)


@pc.register("test: turn")
def turn(x, v, theta):
    return torch.stack([x[..., 1] + v[..., 0], -theta[..., 0] * torch.sin(x[..., 0])], -1)


@pc.register("test: bell")
def bell(h):
    return torch.exp(-(h**2))


@declared
class SpecNudge(StateIntegrator):
    """An integrator defined outside pcnet."""

    size: Positive = number(0.1)

    def step(self, evidence):
        return -self.size * evidence.gradient


def swinging():
    x = GeneralisedStateNode(
        "x", dim=2, orders=3, flow=pendulum, integrator=SpecNudge(0.01), initial_mean=np.eye(3, 2) / 3
    )
    y = SensoryNode("y", dim=1, orders=2, dt=0.1, derivatives="fit", window=5)
    graph = pc.Graph()
    graph.predicts(x, y, via=pc.systems.linear([[1 / 3, 0.1]], [0.5]))
    steps = RobbinsMonro(1e-5, averaging=Exponential(0.3))
    graph.parametrises(ParameterNode("theta", mean=[1 / 7], sd=0.5, estimator=Newton(forgetting_factor=0.01)), x)
    graph.weighs(PrecisionNode("nx", mean=[1e-5, 2.0], sd=0.1, kernel=Matern(0.3, 3.5), estimator=steps), x)
    steps = RobbinsMonro(averaging=WindowMean())
    graph.weighs(
        PrecisionNode("ny", prior_precision=10, sd=0.1, kernel=Autocorrelation(bell, lengthscale=0.5), estimator=steps),
        y,
    )
    return pc.Model(graph, pc.odem(every=[3, 5], periods={"ny": 7})), np.random.default_rng(0).normal(size=(12, 1))


def stacked():
    graph, schedule, stream, _ = stack()
    x = graph["x"]
    known = GeneralisedStateNode("x", dim=2, orders=3, flow=turn, integrator=x.integrator)
    return pc.Model(graph.with_nodes(dict(graph.nodes) | {"x": known}), schedule), stream


def of_paper(**options):
    return odem(**options), 1 + 0.1 * np.random.default_rng(0).normal(size=(12, 3))


def kalman_levels():
    """A Kalman state below categories, with every kernel and estimator that goes with it."""
    graph, _, stream, _ = cases.of_categories()
    x = KalmanStateNode("x", dim=2, flow=SPRING, initial_sd=[0.5, 0.25], orders=4, substeps=2, linearisation="taylor")
    drift = PrecisionNode(
        "drift", mean=0.1, sd=2.0, kernel=Matern(1.5, 0.5), channels="shared", estimator=NoiseScoring()
    )
    parameter_estimator = NoiseScoring(forgetting_factor=0.01, decaying_forgetting=0.5, max_step=0.5, first=3)
    ny = PrecisionNode(
        "ny", prior_precision=9.0, sd=0.5, correlation_time=0.2, correlation_time_sd=0.3, estimator=parameter_estimator
    )
    graph = graph.with_nodes(dict(graph.nodes) | {"x": x, "ny": ny})
    graph.weighs(drift, x)
    levels = (LevelNodes(("x",), ("nx", "ny", "drift"), ("theta",)), LevelNodes(("recorded",), (), ()))
    return pc.Model(graph, adaptive_filtering(3, levels=levels)), stream


SPRING = pc.register("test: spring", cases.SPRING)


def of_adaptive_filter(**options):
    graph, schedule, stream, _ = cases.of_adaptive_filter(**options)
    return pc.Model(graph, schedule), stream


def from_cases(make):
    graph, schedule, stream, _ = make()
    return pc.Model(graph, schedule), stream


CASES = {
    "kalman levels": kalman_levels,
    "adaptive filter": of_adaptive_filter,
    "adaptive filter, model error": lambda: of_adaptive_filter(
        model_error_time=0.5, correlation_time=0.1, correlation_time_sd=0.2
    ),
    "paper": of_paper,
    "authors": lambda: of_paper(conventions="authors", model="lorenz"),
    "batch": lambda: of_paper(kappa=[1.0, 1 / 3], every=[3, 4]),
    "own parts": swinging,
    "stack": stacked,
    "families": lambda: from_cases(cases.of_families),
    "switching": lambda: from_cases(cases.of_switching),
    "several peaks": lambda: from_cases(
        lambda: cases.of_several_peaks(pc.systems.linear([[0.0, 1.0], [-1.0, 0.0]]), pc.systems.linear([[1.0, 0.0]]))
    ),
    "causes": lambda: from_cases(cases.of_causes),
    "sensors": lambda: (two_sensors(), {"a": np.ones((5, 1)), "b": np.ones((5, 1))}),
}


def two_sensors():
    x = GeneralisedStateNode("x", dim=2, orders=2, flow=pc.systems.LotkaVolterra(2, torch.tensor([0.1, -0.2])))
    graph = pc.Graph()
    graph.parametrises(ParameterNode("p", mean=[0.5], sd=0.1), x)
    for name in ("a", "b"):
        y = SensoryNode(name, dim=1, orders=1)
        graph.predicts(x, y, via=pc.TracedFunction(first, parameters=1))
        graph.parametrises(ParameterNode(f"gain {name}", mean=[1.0], sd=0.1), x, of=y)
        graph.weighs(PrecisionNode(f"n{name}", prior_precision=1.0, sd=0.1, correlation_time=1.0), y)
    graph.weighs(PrecisionNode("nx", prior_precision=1.0, sd=0.1, correlation_time=1.0), x)
    return pc.Model(graph, pc.states_only())


def first(x, theta):
    return theta * x[..., :1]


FIRST = pc.register("test: first", pc.TracedFunction(first, parameters=1))


@pytest.mark.parametrize("form", ["yaml", "json", "data"])
@pytest.mark.parametrize("case", CASES)
def test_a_round_trip_is_exact(case, form, tmp_path):
    model, observations = CASES[case]()
    spec = to_spec(model)
    again = pc.load_model(spec if form == "data" else pc.save_model(tmp_path / f"model.{form}", model))
    assert to_spec(again) == spec
    assert list(again.graph.nodes) == list(model.graph.nodes)
    if form == "yaml":
        same(model.run(observations), again.run(observations))


def test_a_file_written_by_hand(tmp_path):
    path = tmp_path / "graph.yaml"
    path.write_text(
        """
        nodes:
          x: {kind: GeneralisedStateNode, dim: 2, orders: 3, flow: {linear: {matrix: [[0, 1], [-1, 0]]}},
              integrator: {kind: LocalLinearisation, step_size: 1e-1}}
          y: {kind: SensoryNode, dim: 2, orders: 2, dt: 0.1}
          noise_x: {kind: PrecisionNode, prior_precision: 10, sd: 0.1, correlation_time: 0.2}
          noise_y: {kind: PrecisionNode, prior_precision: 1e2, sd: 0.1, correlation_time: 0.2}
        links:
          - {predicts: [x, y]}
          - {weighs: [noise_x, x]}
          - {weighs: [noise_y, y]}
        schedule: {odem: {every: 4}}
        """
    )
    x = GeneralisedStateNode(
        "x",
        dim=2,
        orders=3,
        flow=pc.systems.linear([[0.0, 1.0], [-1.0, 0.0]]),
        integrator=pc.integrators.LocalLinearisation(step_size=0.1),
    )
    y = SensoryNode("y", dim=2, orders=2, dt=0.1)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.weighs(PrecisionNode("noise_x", prior_precision=10, sd=0.1, correlation_time=0.2), x)
    graph.weighs(PrecisionNode("noise_y", prior_precision=100, sd=0.1, correlation_time=0.2), y)
    observations = np.random.default_rng(0).normal(size=(9, 2))
    same(graph.run(observations, pc.odem(every=4)), pc.load_model(path).run(observations))
    path.write_text(path.read_text().replace("schedule: {odem: {every: 4}}", ""))
    same(pc.Model(graph).run(observations), pc.Model.load(path).run(observations))


BASE = {
    "nodes": {
        "x": {"kind": "GeneralisedStateNode", "dim": 1, "orders": 2, "flow": "test: first"},
        "y": {"kind": "SensoryNode", "dim": 1, "orders": 1},
        "nx": {"kind": "PrecisionNode", "prior_precision": 1.0, "sd": 0.1, "correlation_time": 1.0},
    },
    "links": [{"predicts": ["x", "y"]}, {"weighs": ["nx", "x"]}],
    "schedule": {"acts": [{"observe": ["sensory"]}]},
}


def changed(*path, to=None, drop=False):
    spec = copy.deepcopy(BASE)
    inner = spec
    for key in path[:-1]:
        inner = inner[key]
    if drop:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return spec


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ([], "must be a mapping"),
        (changed("nodse", to={}), "unknown key 'nodse'; did you mean 'nodes'"),
        (changed("links", drop=True), "'links' is missing"),
        (changed("pcnet", to=2), "format version 2; this pcnet reads up to 1"),
        (changed("pcnet", to="new"), "format version 'new'; this pcnet reads up to 1"),
        (changed("nodes", to=[]), "nodes must be a mapping"),
        (changed("nodes", "x", "ordres", to=2), r"node 'x': unknown key 'ordres'; did you mean 'orders'\?"),
        (
            changed("nodes", "x", "kind", to="GeneralisedStateNod"),
            r"no kind 'GeneralisedStateNod' that fits here; did you mean 'GeneralisedStateNode'\?",
        ),
        (changed("nodes", "x", "kind", to="LocalLinearisation"), "no kind 'LocalLinearisation' that fits here"),
        (
            changed("nodes", "x", "kind", to="GeneralisedVariable"),
            "GeneralisedVariable is abstract",
        ),
        (changed("nodes", "x", "kind", drop=True), "give a mapping with a kind"),
        (changed("nodes", "x", "flow", to="os.system"), "no function 'os.system' is registered"),
        (changed("nodes", "x", "flow", to="lorentz"), "did you mean 'lorenz'"),
        (
            changed("nodes", "x", "flow", to={"linera": {}}),
            r"there is no function factory 'linera'; did you mean 'linear'\?",
        ),
        (changed("nodes", "x", "flow", to={"linear": {"matrx": []}}), r"unknown key 'matrx'; did you mean 'matrix'\?"),
        (changed("nodes", "x", "flow", to={"linear": {"matrix": "A"}}), "flow: linear: must be a number or an array"),
        (changed("nodes", "x", "flow", to={"quadratic": {"coefficients": [1.0]}}), "node 'x', flow: quadratic"),
        (changed("nodes", "x", "dim", to=0), "setting 'dim'"),
        (changed("nodes", "x", "name", to="z"), "unknown key 'name'"),
        (
            changed("nodes", "x", "integrator", to={"kind": "Newton"}),
            "node 'x', integrator: there is no kind 'Newton' that fits",
        ),
        (changed("nodes", "nx", "sd", to={"kind": "LocalLinearisation"}), "a mapping is not allowed here"),
        (changed("nodes", "nx", "sd", to="wide"), "setting 'sd'"),
        (changed("nodes", "nx", "sd", to=-1), "positive"),
        (changed("nodes", "nx", "sd", to=math.inf), "finite"),
        (changed("links", 0, to={"predict": ["x", "y"]}), r"link 0: unknown key 'predict'; did you mean 'predicts'\?"),
        (changed("links", 0, to={"predicts": ["x", "z"]}), "link 0: there is no node 'z'"),
        (changed("links", 0, to={"predicts": ["x"]}), "names of two nodes"),
        (changed("links", 0, to={"predicts": ["x", "y"], "weighs": ["x", "y"]}), "give one of"),
        (changed("links", 0, to={"predicts": ["y", "x"]}), "link 0: .*cannot be"),
        (changed("links", 1, to={"weighs": ["nx", "x"], "via": "identity"}), "via goes with predicts"),
        (changed("links", 1, to={"weighs": ["nx", "x"], "of": "y"}), "of goes with parametrises"),
        (changed("links", 1, drop=True), "the node 'nx' has no links"),
        (changed("schedule", to="oden"), "there is no schedule 'oden'; did you mean 'odem'"),
        (changed("schedule", to={"odem": {"evry": 3}}), r"unknown key 'evry'; did you mean 'every'\?"),
        (changed("schedule", to={"odem": {"every": 0}}), "whole numbers"),
        (
            changed("schedule", "acts", to=[{"observ": ["y"]}]),
            r"acts 0: unknown key 'observ'; did you mean 'observe'\?",
        ),
        (changed("schedule", "acts", to=[{"observe": "y"}]), "give one action with a list"),
        (changed("schedule", "acts", to=[{"observe": ["y"], "every": -1}]), "whole numbers"),
    ],
)
def test_invalid_specifications_are_rejected(spec, words):
    with pytest.raises(SpecificationError, match=words):
        pc.load_model(spec)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes: {x: 1, x: 2}", "more than once"),
        ("a: &b [1]\nc: *b", "aliases"),
        ("a: !!python/object/apply:os.system ['true']", "it is not YAML"),
        ("a: [", "it is not YAML in line"),
        ("\x00", "it is not YAML"),
        ("? [a]\n: 1", "more than once, or is not text"),
    ],
)
def test_invalid_yaml_and_json_is_rejected(text, words, tmp_path):
    with pytest.raises(SpecificationError, match=words):
        parse(text)
    path = tmp_path / "g.yaml"
    path.write_text(text)
    with pytest.raises(SpecificationError, match=r"g.yaml"):
        pc.load_model(path)
    with pytest.raises(SpecificationError, match="it is not JSON"):
        parse(text, "json")


def test_invalid_files_are_rejected(tmp_path):
    with pytest.raises(SpecificationError, match="cannot be read: No such file"):
        pc.load_model(tmp_path / "nothing.yaml")
    (tmp_path / "binary.yaml").write_bytes(bytes(range(128, 256)))
    with pytest.raises(SpecificationError, match="not a text file"):
        pc.load_model(tmp_path / "binary.yaml")
    with pytest.raises(SpecificationError, match="more than once"):
        parse('{"a": 1, "a": 2}', "json")
    deep = "[" * 100_000
    for form in ("json", "yaml"):
        with pytest.raises(SpecificationError):
            parse(deep, form)


def test_unregistered_functions_cannot_be_saved():
    x = GeneralisedStateNode("x", dim=1, orders=1, flow=lambda x, theta: -x)
    graph = pc.Graph()
    graph.predicts(x, SensoryNode("y", dim=1, orders=1))
    with pytest.raises(SpecificationError, match=r"'x', flow: the function <lambda> has no name.*pcnet.register"):
        to_spec(pc.Model(graph))
    with pytest.raises(SettingError, match="'lorenz' is a function that comes with pcnet"):
        pc.register("lorenz", pendulum)
    with pytest.raises(SettingError, match="not a function"):
        pc.register("three", 3)


def test_two_kinds_of_one_name_are_ambiguous():
    def make():
        @declared
        class SpecTwin(StateIntegrator):
            def step(self, evidence):
                return 0 * evidence.mean

        return SpecTwin

    make(), make()
    with pytest.raises(SpecificationError, match="2 kinds 'SpecTwin'"):
        pc.load_model(changed("nodes", "x", "integrator", to={"kind": "SpecTwin"}))


def test_registered_functions_survive_a_round_trip():
    for name in registry.FUNCTIONS:
        assert registry.to_spec(registry.from_spec(name)) == name
    for numbers in (
        {"linear": {"matrix": [[0.1, 0.2]], "offset": [3.0]}},
        {"linear": {"dim": 3}},
        {"linear": {"matrix": [[1.0], [2.0]], "causes": [[3.0], [4.0]]}},
        {"lotka_volterra_of": {"species": 2, "growth": [0.1, 0.2]}},
        {"lorenz_of": {"sigma": 9.0, "beta": 2.0}},
    ):
        function = registry.from_spec(numbers)
        again = registry.from_spec(registry.to_spec(function))
        assert again.identity_key == function.identity_key


def test_the_round_trips_cover_every_shipped_kind():
    """Nodes, integrators, estimators and kernels."""

    def kinds(part):
        yield type(part).__name__
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if dataclasses.is_dataclass(value):
                yield from kinds(value)

    seen = {name for case in CASES.values() for node in case()[0].graph.nodes.values() for name in kinds(node)}
    bases = (Node, StateIntegrator, ParameterEstimator, Averaging, Kernel)
    shipped = {
        kind.__name__
        for each in KINDS.values()
        for kind in each
        if issubclass(kind, bases) and not inspect.isabstract(kind) and kind.__module__.startswith("pcnet.")
    }
    assert shipped <= seen | ADDED


ADDED = {"ExplicitEuler", "SquaredExponential"}
"""Kinds without settings of a type that the others do not have."""


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("adaptive_filtering", adaptive_filtering()),
        ({"adaptive_filtering": {"every": 4}}, adaptive_filtering(4)),
        ({"adaptive_filtering": {"learn_every": 8}}, adaptive_filtering(learn_every=8)),
        (
            {"adaptive_filtering": {"every": 4, "levels": [{"states": ["x"], "parameters": []}, {"states": ["z"]}]}},
            adaptive_filtering(4, levels=(LevelNodes(("x",), parameters=()), LevelNodes(("z",)))),
        ),
        ({"batch": {"nodes": ["precision"]}}, pc.batch(["precision"])),
    ],
    ids=str,
)
def test_schedules_by_name(given, made):
    spec = changed("schedule", to=given)
    assert str(pc.load_model(spec).schedule) == str(made)
    jsonschema.Draft202012Validator(json_schema()).validate(spec)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"levels": []}, "levels must be a list"),
        ({"levels": [{"state": ["x"]}]}, r"level 0: unknown key 'state'; did you mean 'states'\?"),
        ({"levels": [{"states": "x"}]}, "states must be a list"),
        ({"levels": [3]}, "level 0 must be a mapping"),
        ({"every": "often"}, "schedule adaptive_filtering"),
        ({"every": 0, "levels": [{"states": ["x"]}, {"states": ["z"]}]}, "whole numbers"),
        ({"learn_every": 0}, "whole numbers"),
    ],
)
def test_invalid_levels_are_rejected(options, words):
    with pytest.raises(SpecificationError, match=words):
        pc.load_model(changed("schedule", to={"adaptive_filtering": options}))


def test_the_schema_contains_all_kinds():
    found = json_schema()
    assert json.loads(json.dumps(found)) == found
    assert {"GeneralisedStateNode", "SensoryNode", "LocalLinearisation", "Newton", "Matern", "SpecNudge"} <= set(
        found["$defs"]
    )
    state = found["$defs"]["GeneralisedStateNode"]
    assert state["required"] == ["kind", "dim", "orders", "flow"]
    assert {"$ref": "#/$defs/SpecNudge"} in state["properties"]["integrator"]["anyOf"]
    assert state["properties"]["last_error"] == {"enum": ["keep", "drop"]}
    assert found["$defs"]["SensoryNode"]["properties"]["dt"] == {
        "anyOf": [{"$ref": "#/$defs/numbers"}, {"type": "null"}]
    }


def test_specifications_satisfy_the_schema():
    check = jsonschema.Draft202012Validator(json_schema())
    for case in CASES.values():
        check.validate(to_spec(case()[0]))
    assert not check.is_valid(changed("nodes", "x", "ordres", to=2))


# --- fuzzing ---
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(list(BASE["nodes"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def nearly_right(draw):
    """A valid specification with some values replaced."""
    spec = copy.deepcopy(BASE)
    for _ in range(draw(st.integers(1, 3))):
        inner, places = spec, []
        while isinstance(inner, (dict, list)) and inner and (not places or draw(st.booleans())):
            key = draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner))))
            places.append((inner, key))
            inner = inner[key]
        holder, key = places[-1]
        holder[key] = draw(plain)
    return spec


@settings(deadline=None, max_examples=400)
@given(nearly_right() | plain)
def test_any_data_loads_or_raises_a_pcnet_error(spec):
    try:
        model = pc.load_model(spec) if not isinstance(spec, str) else None
    except PcnetError:
        return
    assert model is None or to_spec(model) is not None


@settings(deadline=None, max_examples=400)
@given(
    st.text(max_size=60) | st.binary(max_size=60).map(lambda b: b.decode("latin-1")), st.sampled_from(["yaml", "json"])
)
def test_any_text_parses_or_raises_a_pcnet_error(text, form):
    try:
        parse(text, form)
    except PcnetError:
        return


def test_no_yaml_tag_constructs_a_python_object():
    assert not [tag for tag in Loader.yaml_constructors if tag and "python" in tag]


@pytest.mark.parametrize(
    "text",
    [
        "{odem: {every: []}}",
        "{acts: [{observe: [sensory], exclude: 3}]}",
        f"{{odem: {{every: {'9' * 400}}}}}",
        "{acts: [{update: [state], repeats: 1000000000}]}",
        "{acts: [{update: [state], every: []}]}",
        "{odem: {periods: 3}}",
        "{adaptive_filtering: {levels: 3}}",
        "{batch: {nodes: 3}}",
    ],
)
def test_schedules_that_make_no_sense_have_named_errors(text):
    spec = to_spec(odem(orders=2)) | {"schedule": parse(text)}
    with pytest.raises(SpecificationError):
        from_spec(spec)


def test_reading_is_linear_in_the_number_of_keys():
    """Twenty times the keys take about twenty times as long, not four hundred."""

    def seconds(count):
        text = "\n".join(f"key{i}: 1" for i in range(count))
        started = time.perf_counter()
        parse(text)
        return time.perf_counter() - started

    seconds(100)
    assert seconds(8000) < 100 * min(seconds(400) for _ in range(3))


def test_mutated_specifications_have_named_errors_only():
    assert mutated_specifications(300) == 0

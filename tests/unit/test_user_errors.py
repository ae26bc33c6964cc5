"""Mistakes of the first hour: each error names what is wrong and the remedy."""

import ast
import copy
import dataclasses
import math
import pickle
import re
import warnings

import numpy as np
import pandas as pd
import pytest
import torch

import pcnet as pc
from pcnet.errors import PcnetError, UsageError
from pcnet.graphs import Sensor, adaptive_filter
from pcnet.nodes import GeneralisedStateNode, LikelihoodNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.settings import settings

Y = np.ones((5, 3))


def parts():
    x = GeneralisedStateNode("x", dim=3, orders=3, flow=pc.systems.lotka_volterra)
    y = SensoryNode("y", dim=3, orders=2, dt=0.01)
    return x, y, ParameterNode("a", mean=[0.3, -0.2, 0.3], sd=0.25), precision("noise_x"), precision("noise_y")


def precision(name, **others):
    return PrecisionNode(name, **{"prior_precision": 500, "sd": 0.1, "correlation_time": 0.005} | others)


def graph(*, without=()):
    x, y, a, noise_x, noise_y = parts()
    made = pc.Graph()
    made.predicts(x, y)
    if "a" not in without:
        made.parametrises(a, x)
    for noise, node in ((noise_x, x), (noise_y, y)):
        if noise.name not in without:
            made.weighs(noise, node)
    return made


def small(flow, dim=2, seen=2):
    x, y = GeneralisedStateNode("x", dim=dim, orders=2, flow=flow), SensoryNode("y", dim=seen, orders=1)
    made = pc.Graph()
    made.predicts(x, y)
    for node in (x, y):
        made.weighs(precision(f"noise_{node.name}", correlation_time=0.5), node)
    return made.run(np.ones((3, seen)))


def predicts(parent, child):
    pc.Graph().predicts(parent, child)


def assign():
    parts()[0].orders = 4


# what was done, and what the message must say: the culprit and the remedy
MISTAKES = {
    "a class instead of a node": (
        lambda: predicts(GeneralisedStateNode, parts()[1]),
        ["GeneralisedStateNode is a kind", 'GeneralisedStateNode("x", ...)'],
    ),
    "a name instead of a node": (lambda: predicts("x", "y"), ["'x' is not a node", "pass it itself"]),
    "no name": (
        lambda: GeneralisedStateNode(dim=3, orders=3, flow=pc.systems.lorenz),
        ["'name' is required", 'GeneralisedStateNode("x", ...)'],
    ),
    "a setting left out": (
        lambda: GeneralisedStateNode("x", orders=3, flow=pc.systems.lorenz),
        ["GeneralisedStateNode 'x'", "dim=..."],
    ),
    "a setting misspelt": (
        lambda: GeneralisedStateNode("x", dim=3, order=3, flow=pc.systems.lorenz),
        ["unknown setting 'order'", "did you mean 'orders'?"],
    ),
    "no dt": (
        lambda: SensoryNode("y", dim=3, orders=2),
        ["SensoryNode 'y'", "give dt", "the sampling interval"],
    ),
    "text for a number": (
        lambda: precision("n", prior_precision="500"),
        ["'n'", "'prior_precision'", "must be a number", "not str"],
    ),
    "a negative precision": (
        lambda: precision("n", prior_precision=-1),
        ["PrecisionNode 'n'", "'prior_precision'", "must be positive"],
    ),
    "a precision and its logarithm": (lambda: precision("n", mean=6), ["'n'", "either prior_precision", "or mean"]),
    "no correlation time": (
        lambda: PrecisionNode("n", prior_precision=1, sd=1),
        ["'n'", "give either correlation_time", "or a kernel"],
    ),
    "changing a setting": (assign, ["'orders' of a GeneralisedStateNode", "dataclasses.replace(old, orders=...)"]),
    "a link the wrong way round": (lambda: predicts(*parts()[1::-1]), ["'x'", "did you mean graph.predicts(x, y)?"]),
    "a weight the wrong way round": (
        lambda: pc.Graph().weighs(parts()[0], precision("n")),
        ["'n'", "did you mean graph.weighs(n, x)?"],
    ),
    "two nodes of one name": (
        lambda: predicts(parts()[0], SensoryNode("x", dim=3, orders=1)),
        ["two nodes are called 'x'", "names must differ"],
    ),
    "more orders below than above": (
        lambda: predicts(parts()[0], SensoryNode("y", dim=3, orders=4, dt=0.1)),
        ["'x' has 3 orders", "'y' fewer"],
    ),
    "no precision": (
        lambda: graph(without=("noise_y",)).run(Y),
        ["SensoryNode 'y'", "graph.weighs(PrecisionNode(...), y)"],
    ),
    "no parameters": (
        lambda: graph(without=("a",)).run(Y),
        ["GeneralisedStateNode 'x' takes 3", "graph.parametrises(ParameterNode"],
    ),
    "an empty graph": (lambda: pc.Graph().run(Y), ["empty", "graph.predicts(state, sensory)"]),
    "other dimensions without a mapping": (
        lambda: small(lambda x, theta: -x, seen=1),
        ["the mapping from 'x' to 'y'", "2 dimensions into 1", "via=lambda x, theta: ..."],
    ),
    "a flow of one argument": (
        lambda: small(lambda x: -x),
        ["the flow of GeneralisedStateNode 'x'", "called as f(x, theta)"],
    ),
    "a flow that is not batched": (
        lambda: small(lambda x, theta: x[0] * theta.sum()),
        ["the flow of GeneralisedStateNode 'x'", "returned (2,)", "torch.stack([...], -1)"],
    ),
    "a flow of numpy": (lambda: small(lambda x, theta: np.sin(x)), ["torch.sin, not numpy.sin"]),
    "a flow with an if": (lambda: small(lambda x, theta: x if x.sum() > 0 else -x), ["torch.where instead of if"]),
    "the name of a flow": (
        lambda: GeneralisedStateNode("x", dim=3, orders=2, flow="lorenz"),
        ["function of (state, parameters)"],
    ),
    "observations turned over": (lambda: graph().run(np.ones((3, 50))), ["'y'", "(3, 50)", "observations.T"]),
    "observations too flat": (lambda: graph().run(np.ones(50)), ["'y'", "(50,)", "dim = 3"]),
    "too few channels": (lambda: graph().run(np.ones((5, 2))), ["'y'", "(5, 2)", "dim = 3"]),
    "an infinite number": (lambda: graph().run(Y * np.inf), ["'y'", "[0, 0]", "use NaN for missing values"]),
    "a path for data": (lambda: graph().run("data.csv"), ["not str", "numpy.loadtxt"]),
    "a schedule not called": (lambda: graph().run(Y, pc.odem), ["schedule must be a Schedule", "pcnet.odem()"]),
    "an unknown role": (
        lambda: graph().run(Y, pc.Schedule((pc.act("observe", "sensory"), pc.act("update", "states")))),
        ["'states'", "roles: parameter, precision, sensory, state"],
    ),
    "an unknown action": (lambda: pc.act("move", "state"), ["'action'", "'update'"]),
    "a period of none": (lambda: pc.odem(every=0), ["'every'", "1 or more"]),
    "an unknown record": (lambda: graph().run(Y, record=["means"]), ["'means'", "mean"]),
    "a record of True": (lambda: graph().run(Y, record=True), ["not True", "['mean', 'sd']"]),
    "an unknown device": (lambda: graph().run(Y, device="gpu"), ["'gpu'", "'cuda'"]),
    "a dtype by name": (lambda: graph().run(Y, dtype="float32"), ["'float32'", "torch.float32"]),
    "asking for another node": (lambda: graph().run(Y).mean("theta"), ["'theta'", "nodes: x, y, a"]),
    "asking for what was not kept": (lambda: graph().run(Y).covariance("x"), ["'covariance' of 'x'", "record=["]),
    "reading too early": (lambda: graph().start().mean("x"), ["before the first observation", "call step(y) first"]),
    "a flow that was not recorded": (lambda: graph().run(Y).error_flow(), ["messages", "record=Record.flow()"]),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_the_message_names_the_remedy(name):
    do, words = MISTAKES[name]
    with pytest.raises(PcnetError) as caught:
        do()
    for word in words:
        assert word in str(caught.value)


def test_the_remedies_that_are_named_work():
    assert dataclasses.replace(parts()[0], orders=4).orders == 4
    assert graph().run(np.ones((3, 50)).T).mean("x").shape == (50, 3, 3)
    assert graph().run(Y, record=pc.Record.flow()).error_flow().surprised == ("x", "y")


def two_springs(x, k):
    return torch.stack([x[..., 1], -k[..., 0] * x[..., 0]], -1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m(flow=lambda x, _: x.mul_(-2)), "changes its arguments in place"),
        (lambda m: m(flow=lambda x, _: x @ torch.ones(2, 2)), r"dtype=x\.dtype"),
        (lambda m: m(flow=lambda x, _: x if x[..., 0] > 0 else -x), r"use torch\.where instead of if"),
        (lambda m: m(flow=lambda x, _: math.sin(x)), r"torch\.sin instead of math\.sin"),
        (lambda m: m(flow=lambda x, _, t: x), r"a function of time takes all four, \(x, u, theta, t\)"),
        (lambda m: m(data=[["1", "2"], ["3", "x"]]), r"numpy\.asarray\(y, float\)"),
        (lambda m: adaptive_filter(two_springs, 2, 0.1, paramter_mean=[1.0]), "did you mean 'parameter_mean'"),
        (lambda m: m(data={"Y": np.ones((3, 2))}), r"for 'Y', which is no node that observes; known: y"),
        (lambda m: m(data=np.ones((3, 1))), "left out by a mapping"),
        (lambda m: m(record="flow"), r"use record=pcnet\.Record\.flow\(\)"),
        (lambda m: m(times=np.arange(3).astype("datetime64[s]")), r"of dates, \(t - t\[0\]\)"),
        (lambda m: m().interval("x", 95), "95 % is 0.95"),
        (lambda m: m().save("run.csv"), r"name it 'run\.nc'"),
        (lambda m: m(device="cuda:99"), "'cuda:99' cannot be used: .*use 'cpu'"),
        (lambda m: m(flow=pc.systems.linear([[1.0]])), r"flow of KalmanStateNode 'x': Linear\(1 → 1\) takes"),
        (lambda m: m(flow=lambda x, u, p: x + u), r"nothing drives 'x': give inputs={'u': 1}"),
        (lambda m: adaptive_filter(two_springs, 2, "1 s"), "dt is the time between two observations as a number"),
        (lambda m: adaptive_filter(two_springs, 2, 0.1, switching=[[1.0]]), r"such as CategoricalNode\('mode'"),
        (lambda m: m(record=[]).summary(), r"run with record=\['mean', 'sd', 'energy'\]"),
        (lambda m: m(record=pc.Record.flow()).error_flow().save("x.html", beside=3), "must be another error flow"),
        (lambda m: m(flow=lambda x, _: None), "it returned nothing; end it by return torch.stack"),
        (lambda m: m(flow=lambda x, _: list(x)), "it returned list instead of a tensor"),
        (lambda m: m(flow=lambda x, _: x + torch.randn(())), "is random, or changes from one call to the next"),
        (lambda m: m(flow=lambda x: x), r"takes the argument too: def f\(x, _\)"),
        (lambda m: m(flow=two_springs), r"given no parameters: if it has some, give parameter_mean=\[...\]"),
        (lambda m: m(flow=np.eye(2)), r"not ndarray; of a matrix, pcnet\.systems\.linear\(matrix\)"),
        (lambda m: m(times=[0.0, 0.1]), "as many times as observations, 3, not 2"),
        (lambda m: m(times=np.arange(7.0)), "as many times as observations, 3, not 7"),
        (lambda m: m(t=np.arange(3.0)), "has no argument 't'; use times="),
        (lambda m: m(dt=0.1), "has no argument 'dt'; use dt of the model"),
        (lambda m: m(on_divergnce="hold"), "did you mean 'on_divergence'"),
        (lambda m: m(data=pd.DataFrame(np.ones((3, 3)), columns=["t", "a", "b"])), r"table\[\['a', 'b'\]\], times"),
        (lambda m: m().mean("x[1]"), r"mean\('x'\)\[\.\.\., 1\]"),
        (lambda m: m().mean(), r'needs node: result\.mean\("x"\)'),
        (lambda m: len(m()), r"use result\.observations"),
        (lambda m: adaptive_filter(two_springs, 2, 0.1, Q=np.eye(2)), "no argument 'Q'; use process_noise_sd="),
        (lambda m: adaptive_filter(two_springs, 2, 0.1, x0=[0.0, 0.0]), "use initial_mean="),
        (lambda m: adaptive_filter(two_springs, 2), r"'dt' must be given: adaptive_filter\(flow, dim, dt\)"),
        (lambda m: adaptive_filter(two_springs, 2.0, 0.1), "dim is the number of states, a whole number"),
        (lambda m: adaptive_filter(two_springs, 2, 0.1, process_noise_sd=[0.0, 1.0]), "1e-6 where there is hardly any"),
        (lambda m: SensoryNode("y", dim=1), r"orders=\.\.\. \(Number of generalised orders, 1 for values alone\)"),
        (lambda m: Sensor(dt=0.5), "unknown setting 'dt'; use every="),
        (lambda m: ParameterNode("a", mean=[1.0], sigma=1.0), "unknown setting 'sigma'; use sd="),
        (lambda m: pc.sweep(lambda k: None, {"q": [1.0]}, np.ones((3, 2))), "build takes k, and the grid has q"),
        (
            lambda m: pc.sweep(pc.Model(graph()), {"q": [1.0]}, np.ones((3, 2))),
            "function of settings, not Model: def build",
        ),
    ],
)
def test_mistakes_of_the_first_hour_say_what_to_type(call, words):
    def made(flow=lambda x, _: -x, data=None, **options):
        noise = {"process_noise_sd": 1.0, "observation_noise_sd": 1.0, "hypotheses": None}
        return adaptive_filter(flow, 2, 0.1, **noise).run(np.ones((3, 2)) if data is None else data, **options)

    with pytest.raises(PcnetError, match=words):
        call(made)


@pytest.fixture(scope="module")
def used():
    """A model, a session, a result and a forecast of one small run."""
    noise = {"process_noise_sd": 1.0, "observation_noise_sd": 1.0, "hypotheses": None}
    model = adaptive_filter(lambda x, _: -x, 2, 0.1, **noise)
    session = model.start(engine="eager").run(np.ones((3, 2)))
    return {"model": model, "session": session, "result": session.result(), "forecast": session.forecast(0.2)}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("model.predict", r"s\.forecast\(horizon\)"),
        ("model.filter", r"use model\.run\(observations\)"),
        ("model.x", r'model\.graph\["x"\]'),
        ("model['x']", r'model\.graph\["x"\]'),
        ("model.grph", "did you mean 'graph'"),
        ("session.update", r"use session\.step\(y\)"),
        ("session['x']", r'use session\.mean\("x"\)'),
        ("session.x", r"'x' is a node: use session\.mean"),
        ("session.summary", r"use session\.result\(\)\.summary\(\)"),
        ("session.close", "nothing to close"),
        ("result['x']", r'use result\.mean\("x"\), result\.sd\("x"\)'),
        ("result['z']", r"use result\.mean\(.*nodes: x, y"),
        ("result['x', 'mean']", r'use result\.mean\("x"\)'),
        ("result[0]", r"use result\.mean"),
        ("result.x", r"'x' is a node: use result\.mean"),
        ("result.std", r"use result\.sd"),
        ("result.to_csv", r"to_dataframe\(\)\.to_csv"),
        ("result.sumary", "did you mean 'summary'"),
        ("forecast['y']", r'forecast\.mean\("y"\)'),
        ("forecast.lower", r"forecast\.interval"),
        ("pc.adaptive_filter", r"use pcnet\.graphs\.adaptive_filter"),
        ("pc.KalmanFilter", r"use pcnet\.graphs\.adaptive_filter\(flow, dim, dt\)"),
        ("pc.lotka_volterra", r"use pcnet\.systems\.lotka_volterra"),
        ("pc.load", r"pcnet\.load_model\(path\), pcnet\.Result\.load"),
        ("pc.Modl", "did you mean 'Model'"),
        ("systems.lorenz63", r"there are lorenz \(the one of 1963\)"),
    ],
)
def test_names_of_other_packages_lead_to_those_of_pcnet(used, code, words):
    name, _, rest = code.replace("[", ".[").partition(".")
    thing = {"pc": pc, "systems": pc.systems}.get(name) or used[name]
    key = ast.literal_eval(rest[1:-1]) if rest.startswith("[") else None
    with pytest.raises(AttributeError, match=words):
        thing[key] if rest.startswith("[") else getattr(thing, rest)


def test_guidance_leaves_the_protocols_of_python_alone(used):
    for each in used.values():
        assert not hasattr(each, "no_such_name")
        assert not hasattr(each, "_repr_html_")
        assert getattr(each, "no_such_name", 3) == 3
        copy.deepcopy(each)
        blank = type(each).__new__(type(each))  # as copy and pickle make it
        assert not hasattr(blank, "no_such_name")
        if each is not used["model"]:
            with pytest.raises(TypeError, match="not iterable"):
                iter(each)
    assert pickle.loads(pickle.dumps(used["result"])).observations == 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda u: u["session"].forecast(steps=3), r"no argument 'steps'; use horizon=, in units of time"),
        (lambda u: u["session"].forecast(), r"needs horizon: session\.forecast\(5\.0\)"),
        (lambda u: u["session"].sample(1.0, n=3, seed=0), "use draws="),
        (lambda u: u["result"].interval("x", alpha=0.05), "use probability="),
        (lambda u: u["model"](np.ones((3, 2))), r"use model\.run\(observations\)"),
    ],
)
def test_arguments_of_other_packages_lead_to_those_of_pcnet(used, call, words):
    with pytest.raises(UsageError, match=words):
        call(used)


def test_a_forecast_says_what_it_holds(used):
    assert repr(used["forecast"]) == "Forecast of 2 times, t = 0.3 to 0.4\n  x: (2, 2)\n  y: (2, 2)"


def test_a_setting_does_not_hide_a_property_of_its_node():
    with pytest.raises(PcnetError, match="a setting cannot be called 'shape', which is a property or method of"):

        @settings
        class Gamma(LikelihoodNode):
            shape: float = 3.0


def test_none_in_an_array_of_objects_is_missing(used):
    gaps = np.array([[1.0, 2.0], [None, 3], [np.nan, None]], dtype=object)
    floats = np.array([[1.0, 2.0], [np.nan, 3.0], [np.nan, np.nan]])
    runs = [used["model"].run(each, engine="eager").mean("x") for each in (gaps, floats)]
    np.testing.assert_array_equal(*runs)


def test_a_divergence_names_a_flow_that_is_not_defined_below_zero():
    model = adaptive_filter(lambda x, _: x.log() - 5, 1, 0.1, process_noise_sd=1.0, observation_noise_sd=0.1)
    with pytest.raises(pc.errors.DivergenceError, match="NaN or infinite at negative states"):
        model.run(np.linspace(1.0, -20.0, 60))


@pytest.mark.parametrize("hypotheses", [None, pc.Hypotheses()])
@pytest.mark.parametrize("smooth", [-2, 0, 2.5, "all"])
def test_a_lag_that_is_none_is_refused_at_once(smooth, hypotheses):
    known = {"process_noise_sd": 1.0, "observation_noise_sd": 1.0}
    model = adaptive_filter(lambda x, _: -x, 1, 0.1, hypotheses=hypotheses, **known)
    with pytest.raises(pc.errors.SettingError, match="smooth is True, or the largest lag in observations"):
        model.start(smooth=smooth)


def walk(n=60):
    return np.random.default_rng(0).normal(size=n).cumsum()[:, None]


def with_values(at, value):
    data = walk()
    data[at] = value
    return data


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            with_values([7, 30], -999.0),
            r"'y' is -999 in 2 observations, far from all .*observations == -999\] = numpy.nan",
        ),
        (with_values(slice(40, None), 0.0), "'y' is 0 in 20 observations, while other values do not repeat"),
        (with_values(slice(None), 3.0), "'y' is 3 in all of 60 observations"),
        (
            walk()[:, :, None],
            r"60 batch elements of 'y' have one observation each.*give \(60, 1\), observations\[:, 0\]",
        ),
        ((walk() > 0).astype(float), 'is 0 or 1 and was read as a number .*family="binomial"'),
        (walk(), None),
        (walk().round(), None),  # rounded values repeat
        (np.clip(walk(), -1, 1), None),  # so do limits
        (np.maximum(walk(), -1), None),
        (np.where(walk() > -1, walk() + 30, 0), "'y' is 0 in"),
        (with_values(7, -999.0), None),  # may be an outlier
        (with_values(slice(20, 40), np.nan), None),
        (walk()[None] * np.ones((3, 1, 1)), None),
    ],
)
def test_a_run_warns_of_codes_for_missing_values(data, words):
    model = adaptive_filter(lambda x, _: 0 * x, 1, 1.0, process_noise_sd=1.0, observation_noise_sd=1.0, hypotheses=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model.run(data, engine="eager")
    texts = [str(each.message) for each in caught if each.category is UserWarning]
    assert len(texts) == (words is not None)
    if words is not None:
        assert re.search(words, texts[0])


def seen_twice(index, **options):
    """A run over a table of 20 rows with this index; the model's sampling interval is 0.1."""
    noise = {"process_noise_sd": 1.0, "observation_noise_sd": 1.0, "hypotheses": None}
    table = pd.DataFrame({"a": np.sin(np.arange(20.0)), "b": np.cos(np.arange(20.0))}, index=index)
    return adaptive_filter(lambda x, _: -x, 2, 0.1, **noise).run(table, engine="eager", **options)


TIMES = np.cumsum(np.random.default_rng(0).uniform(0.05, 0.15, 20))


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (TIMES, r"index of the table has steps from .* not read.* dt = 0\.1 apart: give times=table\.index"),
        (pd.to_datetime(TIMES, unit="s", utc=True), r"times=\(table\.index - table\.index\[0\]\)\.total_seconds"),
        (np.delete(np.arange(25), [3, 4, 9, 11, 20]), r"dropna\(\), are better kept as NaN"),
        (0.5 * np.arange(20), r"steps of 0\.5.* dt = 0\.1 apart: give times=table\.index"),
        ([*range(10), *range(10)], r"does not increase at row 10.*table\.sort_index\(\)"),
    ],
)
def test_a_run_warns_of_an_index_that_it_does_not_read(index, words):
    with pytest.warns(UserWarning, match=words):
        seen_twice(index)


@pytest.mark.parametrize(
    ("index", "options"),
    [
        (None, {}),
        (0.1 * np.arange(20) + 3, {}),
        (pd.date_range("2024", periods=20, freq="100ms"), {}),
        (range(0, 40, 2), {}),
        ([f"row {k}" for k in range(20)], {}),
        (TIMES, {"times": TIMES}),
    ],
)
def test_an_index_that_fits_is_not_mentioned(index, options, recwarn):
    seen_twice(index, **options)
    assert not [each for each in recwarn if "index of" in str(each.message)]


def test_a_run_warns_of_times_of_xarray_that_it_does_not_read():
    xarray = pytest.importorskip("xarray")
    noise = {"process_noise_sd": 1.0, "observation_noise_sd": 1.0, "hypotheses": None}
    model = adaptive_filter(lambda x, _: -x, 2, 0.1, **noise)
    y = np.sin(np.arange(40.0)).reshape(20, 2)
    for dims, shape in (("time", "channel"), (20, 2)), (("batch", "time", "channel"), (1, 20, 2)):
        table = xarray.DataArray(y.reshape(shape), dims=dims, coords={"time": TIMES})
        with pytest.warns(UserWarning, match="index of the table has steps"):
            model.run(table, engine="eager")


def test_nothing_is_read_from_a_bank_before_the_first_observation():
    session = adaptive_filter(lambda x, _: -x, 2, 0.1).start()
    for read in (lambda: session.mean("x"), lambda: session.sd("x"), lambda: session.weights):
        with pytest.raises(PcnetError, match=r"before the first observation; call step\(y\) first"):
            read()


@pytest.mark.parametrize(
    ("flow", "words"),
    [
        (lambda x, k: (-k * x).float(), r"the flow of .* returns torch\.float32 .* leave out \.float\(\)"),
        (lambda x, k: x.mul_(1.0) * -k, "in place"),
    ],
)
def test_a_flow_of_another_dtype_or_in_place_is_refused(flow, words):
    with pytest.raises(PcnetError, match=words):
        adaptive_filter(flow, 2, 0.1, parameter_mean=[1.0], parameter_sd=0.5).run(np.ones((3, 2)))


def test_a_sampling_interval_that_is_none_is_named():
    with pytest.raises(PcnetError, match=r"dt is the time between two observations .* not None"):
        adaptive_filter(lambda x, _: -x, 2, None)

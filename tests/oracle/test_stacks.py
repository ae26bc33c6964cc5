"""Causes that drive states, and stacks of them: derivatives, joint steps, and SPM's own inversions."""

import math

import numpy as np
import pytest
import torch
from torch.func import grad, hessian

import pcnet as pc
from pcnet.errors import GraphError, SettingError
from pcnet.nodes import CauseNode, GeneralisedStateNode, InputNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.estimators import Newton, RobbinsMonro
from pcnet.numerics.generalised import embed, shift_matrix
from pcnet.numerics.integrators import ImplicitEuler, LocalLinearisation
from support.models import FLOWS, MAPPINGS, Model, bent
from support.paths import DATA

STILL = pc.Schedule(acts=(pc.act("observe", "sensory"),))
"""Beliefs stay where they were drawn."""


def stack(dims=(2, 1), causes=(1, 2), cause_orders=(2, 3)):
    """y ← x1 ← v1 ← x2 ← v2, all functions nonlinear in everything, with parameters of a flow and of a mapping.

    x2 also predicts the parameters of x1's flow.
    """
    generator, integrator, curvature = torch.Generator().manual_seed(1), LocalLinearisation(0.5, step_size=0.1), "exact"

    def draw(*shape):
        return 0.6 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    model = Model(pc.Graph(), {"y": draw(6, 2)})
    graph = model.graph

    def state(name, dim):
        options = {"flow": FLOWS[dim], "integrator": integrator, "curvature": curvature, "initial_mean": draw(3, dim)}
        return GeneralisedStateNode(name, dim=dim, orders=3, **options)

    def cause(name, dim, orders):
        options = {"integrator": integrator, "curvature": curvature, "initial_mean": draw(orders, dim), "prior": 0.3}
        return CauseNode(name, dim=dim, orders=orders, **options)

    x1, x2 = state("x1", dims[0]), state("x2", dims[1])
    v1, v2 = cause("v1", causes[0], cause_orders[0]), cause("v2", causes[1], cause_orders[1])
    y = SensoryNode("y", dim=2, orders=2, dt=0.2)
    graph.predicts(x1, y, via=MAPPINGS[dims[0]])
    graph.drives(v1, x1)
    graph.predicts(x2, v1, via=bent(causes[0]))
    graph.drives(v2, x2)
    model.mappings |= {("x1", "y"): MAPPINGS[dims[0]], ("x2", "v1"): bent(causes[0]), ("x2", "theta1"): bent(2)}
    for name, child, of in (("theta1", x1, None), ("theta2", x2, None), ("phi", x1, y)):
        theta = ParameterNode(name, mean=draw(2), sd=0.7, curvature=curvature)
        graph.parametrises(theta, child, of=of)
        if name == "theta1":
            graph.predicts(x2, theta, via=bent(2))
    for i, node in enumerate((x1, v1, y, x2, v2)):
        noise = PrecisionNode(
            f"n_{node.name}", prior_precision=2.0 + i, sd=0.5, correlation_time=0.6, curvature=curvature
        )
        model.widths[noise.name] = 0.6
        graph.weighs(noise, node)
    return model


def test_local_derivatives_of_a_stack_are_those_of_the_total_energy():
    model = stack()
    session = model.graph.start(STILL, record=())
    for t in range(2):
        session.step(model.observations["y"][t])
    means = {name: session.mean(name) for name, node in model.graph.nodes.items() if "mean" in node.quantities}
    observed = {"y": session.read("y", "observation")}
    for name, mean in means.items():

        def energy(value, name=name):
            return model.energy({**means, name: value}, observed)

        node, local = model.graph[name], session.context(name)
        expected = grad(energy)(mean).reshape(-1)
        torch.testing.assert_close(node.gradient(local)[0], expected, rtol=1e-9, atol=1e-9)
        expected = hessian(energy)(mean).reshape(len(expected), len(expected))
        torch.testing.assert_close(node.hessian(local)[0], expected, rtol=1e-9, atol=1e-8)


def linear_stack(integrator, seed=3, branch=False):
    """The same in linear: a chain of two levels or, with branch, a cause that drives two states."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    graph = pc.Graph()
    x1 = GeneralisedStateNode(
        "x1", dim=2, orders=3, flow=pc.systems.linear(draw(2, 2), causes=draw(2, 1)), integrator=integrator
    )
    v1 = CauseNode("v1", dim=1, orders=2, integrator=integrator, prior=0.4)
    x2 = GeneralisedStateNode(
        "x2", dim=1, orders=3, flow=pc.systems.linear(draw(1, 1), causes=draw(1, 1)), integrator=integrator
    )
    y1 = SensoryNode("y1", dim=2, orders=2, dt=0.3)
    graph.predicts(x1, y1, via=pc.systems.linear(draw(2, 2), causes=draw(2, 1)))
    graph.drives(v1, x1)
    if branch:
        y2 = SensoryNode("y2", dim=1, orders=3, dt=0.3)
        graph.predicts(x2, y2)
        graph.drives(v1, x2)
        nodes = (x1, v1, x2, y1, y2)
    else:
        v2 = CauseNode("v2", dim=1, orders=3, integrator=integrator)
        graph.predicts(x2, v1, via=pc.systems.linear(draw(1, 1)))
        graph.drives(v2, x2)
        nodes = (x1, v1, x2, y1, v2)
    model = Model(graph, {node.name: draw(5, node.dim) for node in nodes if node.observes})
    for i, node in enumerate(nodes):
        noise = PrecisionNode(f"n_{node.name}", prior_precision=1.0 + i, sd=0.5, correlation_time=0.6)
        model.widths[noise.name] = 0.6
        graph.weighs(noise, node)
    model.mappings = {(k.parent.name, k.child.name): k.function for k in graph.links if k.key == "predicts"}
    if branch:
        model.mappings["x2", "y2"] = None
    return model


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("kappa", [1.0, 0.4])
def test_elimination_messages_are_the_dense_solve(branch, kappa):
    """(I/h − D + κH) Δ = Du − κ∇ of all states and causes at once, from autograd of the total energy."""
    h = 0.7
    model = linear_stack(ImplicitEuler(step_size=h, kappa=kappa), branch=branch)
    session = model.graph.start(STILL, record=())
    session.step({name: values[0] for name, values in model.observations.items()})
    names = [name for name, node in model.graph.nodes.items() if node.role == "state"]
    start = {name: session.mean(name) for name, node in model.graph.nodes.items() if "mean" in node.quantities}
    moving = pc.Schedule(acts=(pc.act("observe", "sensory"), pc.act("update", "state")))
    session = model.graph.start(moving, record=())
    session.step({name: values[0] for name, values in model.observations.items()})
    observed = {name: session.read(name, "observation") for name in model.observations}
    shapes = [start[name].shape for name in names]
    sizes = [math.prod(shape) for shape in shapes]

    def energy(flat):
        parts = [part.reshape(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        return model.energy({**start, **dict(zip(names, parts, strict=True))}, observed)

    u = torch.cat([start[name].reshape(-1) for name in names])
    shift = torch.block_diag(*[shift_matrix(*shape) for shape in shapes])
    matrix = torch.eye(len(u), dtype=torch.float64) / h - shift + kappa * hessian(energy)(u)
    expected = u + torch.linalg.solve(matrix, shift @ u - kappa * grad(energy)(u))
    found = torch.cat([session.mean(name).reshape(-1) for name in names])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_an_unused_cause_changes_nothing():
    """To the last digit."""
    flow = torch.tensor([[-0.2, 1.0], [-1.0, -0.2]])
    seen = torch.randn(20, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def graph(causes):
        x = GeneralisedStateNode("x", dim=2, orders=3, flow=pc.systems.linear(flow, causes=causes))
        y = SensoryNode("y", dim=2, orders=2, dt=0.1)
        made = pc.Graph()
        made.predicts(x, y)
        made.weighs(PrecisionNode("nx", prior_precision=5.0, sd=0.1, correlation_time=0.3), x)
        made.weighs(PrecisionNode("ny", prior_precision=9.0, sd=0.1, correlation_time=0.3), y)
        if causes is not None:
            v = CauseNode("v", dim=1, orders=2)
            made.drives(v, x)
            made.weighs(PrecisionNode("nv", prior_precision=1.0, sd=0.1, correlation_time=0.3), v)
        return made

    schedule = pc.odem(every=5)
    alone = graph(None).run(seen, schedule=schedule)
    beside = graph(torch.zeros(2, 1)).run(seen, schedule=schedule)
    for node in ("x", "nx", "ny"):
        np.testing.assert_allclose(beside.mean(node), alone.mean(node), rtol=1e-12, atol=1e-13)
    assert np.abs(beside.mean("v")).max() == 0.0


def test_a_cause_may_drive_two_states():
    model = linear_stack(LocalLinearisation(step_size=0.1), branch=True)
    result = model.graph.run(model.observations, schedule=pc.generalised_filtering())
    assert np.isfinite(result.mean("v1")).all()
    assert np.abs(result.mean("v1")[-1]).max() > 0


# --- parameters that are predicted from above ---
def predicted_parameter(sd):
    """ẋ = a(1 − x), where the prior of a is N(0.7, sd²) unless a level above predicts it."""
    x = GeneralisedStateNode("x", dim=1, orders=2, flow=lambda x, a: a * (1 - x), initial_mean=[[0.0], [0.0]])
    y = SensoryNode("y", dim=1, orders=2, dt=0.1)
    a = ParameterNode("a", mean=[0.7], sd=sd, estimator=RobbinsMonro(0.01))
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.parametrises(a, x)
    for name, node in (("nx", x), ("ny", y)):
        graph.weighs(PrecisionNode(name, prior_precision=50.0, sd=0.1, correlation_time=0.3), node)
    return graph, a


def test_a_constant_prediction_equals_a_static_prior():
    """A level above that stays at the mean of the prior, without renewed priors."""
    seen = (1 - torch.exp(-1.5 * torch.arange(60) * 0.1))[:, None]
    acts = (
        pc.act("observe", "sensory"),
        pc.act("update", "x"),
        pc.act("accumulate", "parameter"),
        pc.act("update", "parameter", every=5),
        pc.act("update_covariance", "parameter", every=5),
        pc.act("update_covariance", "x"),
    )
    alone, _ = predicted_parameter(0.4)
    below, a = predicted_parameter(0.4)
    top = GeneralisedStateNode("top", dim=1, orders=1, flow=lambda x, _: 0 * x, initial_mean=[[0.7]])
    below.predicts(top, a)
    below.weighs(PrecisionNode("ntop", prior_precision=1.0, sd=0.1, correlation_time=0.3), top)
    first = alone.run(seen, schedule=pc.Schedule(acts=acts))
    second = below.run(seen, schedule=pc.Schedule(acts=acts))
    for node in ("x", "a"):
        np.testing.assert_array_equal(second.mean(node), first.mean(node))
    np.testing.assert_allclose(second.free_energy_of("a"), first.free_energy_of("a"), rtol=1e-12)
    assert not np.array_equal(first.mean("a")[0], first.mean("a")[-1])


def test_the_error_of_a_parameter_moves_the_level_above():
    """It goes where the data pull the parameter."""
    seen = (1 - torch.exp(-2.0 * torch.arange(300) * 0.1))[:, None]
    graph, a = predicted_parameter(0.2)
    top = GeneralisedStateNode(
        "top",
        dim=1,
        orders=1,
        flow=lambda x, _: 0 * x,
        initial_mean=[[0.7]],
        integrator=LocalLinearisation(step_size=0.1),
    )
    graph.predicts(top, a)
    graph.weighs(PrecisionNode("ntop", prior_precision=1e-3, sd=0.1, correlation_time=0.3), top)
    result = graph.run(seen, schedule=pc.odem(every=5))
    moved = result.mean("top")[-1, 0, 0] - 0.7
    assert abs(moved) > 1e-3
    assert np.sign(moved) == np.sign(result.mean("a")[-1, 0] - 0.7)
    error = (result.mean("a")[-1, 0] - result.mean("top")[-1, 0, 0]) / 0.2**2
    assert np.isfinite(error)


def test_newton_is_rejected_for_predicted_parameters():
    x = GeneralisedStateNode("x", dim=1, orders=2, flow=lambda x, a: a * (1 - x))
    top = GeneralisedStateNode("top", dim=1, orders=1, flow=lambda x, _: 0 * x)
    y, a = SensoryNode("y", dim=1, orders=2, dt=0.1), ParameterNode("a", mean=[0.7], sd=0.3, estimator=Newton())
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.parametrises(a, x)
    graph.predicts(top, a)
    for node in (x, y, top):
        graph.weighs(noise(f"n{node.name}"), node)
    with pytest.raises(GraphError, match="'a' is predicted from above, but Newton keeps its first prior"):
        graph.check()


# --- inputs ---
def driven_by_input(gain):
    """ẋ = −x + v with a known input u of which v may differ."""
    x = GeneralisedStateNode(
        "x", dim=1, orders=2, flow=pc.systems.linear([[-1.0]], causes=[[1.0]]), integrator=ImplicitEuler(step_size=0.1)
    )
    v = CauseNode("v", dim=1, orders=2, integrator=ImplicitEuler(step_size=0.1))
    u = InputNode("u", dim=1, orders=2, dt=0.1)
    y = SensoryNode("y", dim=1, orders=2, dt=0.1)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.drives(v, x)
    graph.predicts(u, v)
    for name, node, expected in (("nx", x, 1e4), ("ny", y, 1e2), ("nv", v, gain)):
        graph.weighs(PrecisionNode(name, prior_precision=expected, sd=0.1, correlation_time=0.5), node)
    return graph


def test_a_cause_is_between_its_input_and_the_observations():
    """The input is 1, the observations suggest 2."""
    t = torch.arange(400) * 0.1
    seen = {"u": torch.ones(400, 1), "y": (2 * (1 - torch.exp(-t)))[:, None]}
    ends = [driven_by_input(gain).run(seen, schedule=pc.states_only()).mean("v")[-1, 0, 0] for gain in (1e-3, 1e8)]
    assert ends[0] == pytest.approx(2.0, abs=0.01)
    assert ends[1] == pytest.approx(1.0, abs=0.01)


# --- SPM ---
def weigh(graph, node, precision, bins):
    """A known precision, with SPM's kernel: its autocorrelation is exp(−t²/4s²)."""
    name = f"precision of {node.name}"
    graph.weighs(PrecisionNode(name, mean=math.log(precision), sd=1e-3, correlation_time=math.sqrt(2) * bins), node)


def ahead(times=1):
    """Data move on to the next bin, and states and causes with them."""
    moves = [pc.act("update", who) for _ in range(times) for who in ("sensory", "state")]
    return pc.Schedule(
        acts=(pc.act("observe", "sensory"), *moves, pc.act("update_covariance", "state")), name="SPM's look-ahead"
    )


def errors(result, truth, starts=None):
    """Sums of squared errors; as SPM does, an estimate counts for the bin that it was made for, the next one."""
    found = {}
    for name, values in truth.items():
        mean = result.mean(name)[:, 0]
        start = np.zeros((1, mean.shape[1])) if starts is None else starts
        found[name] = float(((np.concatenate([start, mean[:-1]]) - values.T) ** 2).sum())
    return found


def test_convolution_is_inverted_as_accurately_as_by_spm():
    d = np.load(DATA / "spm_convolution.npz")
    step = ImplicitEuler(step_size=1.0)
    flow = pc.systems.linear(d["M1_pE_f"], causes=d["M1_pE_h"])
    x = GeneralisedStateNode("x", dim=2, orders=7, flow=flow, integrator=step, initial_mean=np.zeros((7, 2)))
    v = CauseNode("v", dim=1, orders=3, integrator=step)
    y = SensoryNode("y", dim=4, orders=7, derivatives="given", extrapolate=1.0)
    graph = pc.Graph()
    graph.predicts(x, y, via=pc.systems.linear(d["M1_pE_g"]))
    graph.drives(v, x)
    for node, precision in ((y, d["M1_V"][0, 0]), (x, d["M1_W"][0, 0]), (v, d["M2_V"][0, 0])):
        weigh(graph, node, precision, 0.5)
    result = graph.run(embed(torch.tensor(d["Y"].T), 7).flatten(1), schedule=ahead())
    found = errors(result, {"x": d["pU_x1"], "v": d["pU_v2"]})
    spm = [((d[q] - d[p]) ** 2).sum() for q, p in (("qU_x1", "pU_x1"), ("qU_v2", "pU_v2"))]
    assert spm == pytest.approx([0.1448, 0.1613], abs=1e-4)
    assert found["x"] <= 1.02 * spm[0]
    assert found["v"] <= 1.02 * spm[1]


def test_a_hierarchy_of_three_levels_is_inverted_as_accurately_as_by_spm():
    d = np.load(DATA / "spm_hierarchy3.npz")
    step = ImplicitEuler(step_size=1.0)
    flows = [pc.systems.linear(d[f"P{i}_f"], causes=d[f"P{i}_h"]) for i in (1, 2)]
    x1 = GeneralisedStateNode("x1", dim=2, orders=7, flow=flows[0], integrator=step, initial_mean=np.zeros((7, 2)))
    x2 = GeneralisedStateNode("x2", dim=1, orders=7, flow=flows[1], integrator=step, initial_mean=np.zeros((7, 1)))
    v2, v3 = (CauseNode(name, dim=1, orders=4, integrator=step) for name in ("v2", "v3"))
    y = SensoryNode("y", dim=4, orders=7, derivatives="given", extrapolate=1.0)
    graph = pc.Graph()
    graph.predicts(x1, y, via=pc.systems.linear(d["P1_g"]))
    graph.drives(v2, x1)
    graph.predicts(x2, v2)
    graph.drives(v3, x2)
    for node, key in ((y, "M1_V"), (x1, "M1_W"), (v2, "M2_V"), (x2, "M2_W"), (v3, "M3_V")):
        weigh(graph, node, d[key][0, 0], 0.5)
    result = graph.run(embed(torch.tensor(d["Y"].T), 7).flatten(1), schedule=ahead())
    found = errors(result, {"x1": d["pU_x1"], "v2": d["pU_v2"], "x2": d["pU_x2"], "v3": d["pU_v3"]})
    for name, error in found.items():
        spm = ((d[f"qU_{name}"] - d[f"pU_{name}"]) ** 2).sum()
        assert error <= 1.05 * spm, name


def test_a_lorenz_attractor_is_tracked_from_a_wrong_start_as_accurately_as_by_spm():
    d = np.load(DATA / "spm_lorenz.npz")
    sigma, beta, rho = d["M1_pE_vec"].ravel()

    def flow(x, _):
        a, b, c = x.unbind(-1)
        return torch.stack([sigma * (b - a), (rho - 2 * c) * a - b, 2 * a * b + beta * c], -1) / 32

    start = np.zeros((7, 3))
    start[0] = d["M1_x"].ravel()
    x = GeneralisedStateNode(
        "x",
        dim=3,
        orders=7,
        flow=flow,
        integrator=LocalLinearisation(step_size=0.5),
        initial_mean=start,
        jacobian_derivative="drop",
    )
    y = SensoryNode("y", dim=1, orders=7, derivatives="given", extrapolate=0.5)
    graph = pc.Graph()
    graph.predicts(x, y, via=pc.systems.linear(np.ones((1, 3))))
    for node, key in ((y, "M1_V"), (x, "M1_W")):
        weigh(graph, node, d[key][0, 0], 0.125)
    result = graph.run(embed(torch.tensor(d["Y"].T), 7).flatten(1), schedule=ahead(times=2))
    mean = np.concatenate([start[:1], result.mean("x")[:-1, 0]])
    squared, spm = (mean - d["pU_x1"].T) ** 2, (d["qU_x1"] - d["pU_x1"]).T ** 2
    assert squared.mean() <= 1.05 * spm.mean()
    assert squared[32:].mean() <= 1.05 * spm[32:].mean()


# --- the contract ---


# --- words ---
def parts():
    x = GeneralisedStateNode("x", dim=2, orders=3, flow=pc.systems.linear(np.eye(2), causes=np.ones((2, 1))))
    plain = GeneralisedStateNode("plain", dim=2, orders=3, flow=pc.systems.linear(np.eye(2)))
    return x, plain, CauseNode("v", dim=1, orders=2), SensoryNode("y", dim=2, orders=2, dt=0.1), pc.Graph()


def noise(name):
    return PrecisionNode(name, prior_precision=1.0, sd=1.0, correlation_time=1.0)


def test_invalid_links_are_rejected():
    x, plain, v, y, graph = parts()
    with pytest.raises(GraphError, match=r"SensoryNode 'y' cannot be the child in 'v' drives 'y'"):
        graph.drives(v, y)
    with pytest.raises(GraphError, match="'x' cannot drive 'plain' directly; put a CauseNode between them"):
        graph.drives(x, plain)
    graph.predicts(x, y)
    graph.weighs(noise("nx"), x)
    graph.weighs(noise("ny"), y)
    with pytest.raises(
        GraphError,
        match=r"flow of GeneralisedStateNode 'x' takes three arguments.*nothing drives 'x'.*graph.drives\(node, x\)",
    ):
        graph.check()
    graph.drives(v, x)
    with pytest.raises(GraphError, match="'v' already drives 'x'"):
        graph.drives(v, x)
    with pytest.raises(GraphError, match="CauseNode 'v' has no precision"):
        graph.check()
    graph.weighs(noise("nv"), v)
    graph.check()


def test_an_unused_cause_is_rejected():
    _, plain, v, y, graph = parts()
    graph.predicts(plain, y)
    graph.drives(v, plain)
    for node in (plain, v, y):
        graph.weighs(noise(f"n{node.name}"), node)
    with pytest.raises(GraphError, match=r"driven by 'v', but neither its flow nor a mapping of it takes causes"):
        graph.check()


def test_a_prior_of_the_wrong_size_is_rejected():
    with pytest.raises(SettingError, match="prior must be one number or end in 1, not in 3"):
        CauseNode("v", dim=1, orders=2, prior=[1.0, 2.0, 3.0])


def test_a_cause_with_too_many_orders_is_rejected():
    x, _, _, y, graph = parts()
    v = CauseNode("v", dim=1, orders=4)
    graph.predicts(x, y)
    graph.drives(v, x)
    for node in (x, v, y):
        graph.weighs(noise(f"n{node.name}"), node)
    with pytest.raises(GraphError, match="has 3 orders, fewer than the 4 of its cause 'v'"):
        graph.check()

"""Gradients and curvatures that nodes compute from messages are those of the total energy."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, hessian

import pcnet as pc
from support.models import build

SHAPES = {"dims": (1, 3), "orders": (2, 3), "channels": (2, 1)}
"""Few, because every function is traced for each shape, which takes most of the time."""
graphs = st.lists(st.integers(0, 1), min_size=1, max_size=2).flatmap(
    lambda states: st.fixed_dictionaries(
        {name: st.just(tuple(sizes[i] for i in states)) for name, sizes in SHAPES.items()}
        | {
            "parameters": st.sampled_from([(2,), (1, 1)]),
            "mapping_parameters": st.sampled_from([0, 2]),
            "precisions": st.sampled_from(["each", "shared", "full"]),
            "last_error": st.sampled_from(["keep", "drop"]),
            "fused": st.booleans(),
            "seed": st.integers(0, 10_000),
        }
    )
)


def means_of(session, graph):
    found = {}
    for name, node in graph.nodes.items():
        if "mean" in node.quantities:
            found[name] = session.mean(name)
    return found


STILL = pc.Schedule(acts=(pc.act("observe", "sensory"),))
"""Beliefs stay where they were drawn: derivatives are compared there, not where a step has taken them."""


def leave_the_priors(session, seed):
    """Move parameters, log-precisions and couplings off their prior means, where half of what is compared vanishes."""
    generator = torch.Generator().manual_seed(seed)
    for name, node in session.graph.nodes.items():
        if node.role in ("parameter", "precision"):
            state = session.state.nodes[name]
            away = torch.randn(state.mean.shape, generator=generator, dtype=torch.float64)
            with torch.inference_mode():
                session.replace_nodes({name: state._replace(mean=state.mean + 0.4 * away)})


@settings(max_examples=10, deadline=None)
@given(graphs)
def test_local_derivatives_are_those_of_the_total_energy(options):
    model = build(**options, curvature="exact", samples=3)
    session = model.graph.start(STILL, record=())
    for t in range(2):
        session.step({name: y[t] for name, y in model.observations.items()})
    leave_the_priors(session, options["seed"])
    means = means_of(session, model.graph)
    observed = {name: session.read(name, "observation") for name in model.observations}

    for name, node in model.graph.nodes.items():
        if name not in means:
            continue

        def energy(value, name=name):
            return model.energy({**means, name: value}, observed)

        local = session.context(name)
        expected = grad(energy)(means[name]).reshape(-1)
        torch.testing.assert_close(node.gradient(local)[0], expected, rtol=1e-9, atol=1e-9)
        expected = hessian(energy)(means[name]).reshape(len(expected), len(expected))
        torch.testing.assert_close(node.hessian(local)[0], expected, rtol=1e-9, atol=1e-8)


@settings(max_examples=4, deadline=None)
@given(graphs)
def test_gauss_newton_is_never_indefinite(options):
    model = build(**options, curvature="gauss-newton", samples=3)
    session = model.graph.start(STILL, record=())
    session.step({name: y[0] for name, y in model.observations.items()})
    leave_the_priors(session, options["seed"])
    for name in means_of(session, model.graph):
        curvature = model.graph[name].hessian(session.context(name))[0]
        values = torch.linalg.eigvalsh(curvature)
        assert values.min() >= -1e-12 * values.max()


def test_free_energy_is_that_of_the_paper():
    """F = energy at the means − ½ log-determinants of posteriors and priors, all formed densely."""
    model = build(dims=(2,), orders=(3,), channels=(2,), samples=8)
    session = model.graph.start(pc.odem(every=3), record=())
    session.step({name: y[0] for name, y in model.observations.items()})
    means = means_of(session, model.graph)
    observed = {name: session.read(name, "observation") for name in model.observations}
    total = model.energy(means, observed)  # priors are still those given, before the first slow step
    for name, node in model.graph.nodes.items():
        if name not in means:
            continue
        total = total - 0.5 * torch.linalg.slogdet(session.read(name, "covariance"))[1]
        if node.role in ("parameter", "precision"):
            total = total + means[name].numel() * math.log(float(node.sd))
    y = observed["y0"]
    total = total + 0.5 * y.numel() * math.log(2 * math.pi)
    assert session.free_energy == pytest.approx(float(total), rel=1e-12)


def test_free_action_is_the_sum_of_the_free_energy():
    model = build(samples=30)
    result = model.graph.run(model.observations, schedule=pc.odem(every=4))
    assert float(result.free_action) == pytest.approx(result.free_energy.sum(), rel=1e-12)
    sparse = model.graph.run(model.observations, schedule=pc.odem(every=4), record=pc.Record(every=7))
    assert sparse.free_energy.shape == (4,)
    assert float(sparse.free_action) == pytest.approx(float(result.free_action), rel=1e-12)

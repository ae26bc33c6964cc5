"""Runs with everything recorded that an error flow shows."""

import functools

import numpy as np
import torch

import pcnet as pc
from pcnet.graphs import odem
from pcnet.nodes import CauseNode, GeneralisedStateNode, InputNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.results.result import Result, Trace


@functools.cache
def paper_run(samples=150):
    """The paper's graph with an outlier in the middle of its observations."""
    observations = pc.simulate.glv_process(samples, noise="white", seed=1).observations.clone()
    observations[samples // 2] += 1.0
    graph, schedule = odem(every=20)
    return graph.run(observations, schedule, record=pc.Record.flow())


def stack(levels=2):
    """y ← x1 ← v1 ← x2 ← …, the topmost cause by a known input; parameters of the lowest flow and mapping."""
    step = pc.integrators.ImplicitEuler(step_size=0.1)
    graph, y = pc.Graph(), SensoryNode("y", dim=2, orders=2, dt=0.1)
    below, weighed = y, [y]
    for i in range(1, levels + 1):
        dim = 2 if i == 1 else 1
        x = GeneralisedStateNode(f"x{i}", dim=dim, orders=3, flow=_flow, integrator=step)
        cause = CauseNode(f"v{i}", dim=1, orders=2, integrator=step)
        graph.predicts(x, below, via=_mapping if i == 1 else None)
        graph.drives(cause, x)
        weighed += [x, cause]
        below = cause
        if i == 1:
            graph.parametrises(ParameterNode("a", mean=[0.3], sd=0.1), x)
            graph.parametrises(ParameterNode("b", mean=[1.0], sd=0.1), x, of=y)
    graph.predicts(InputNode("u", dim=1, orders=2, dt=0.1), below)
    for node in weighed:
        graph.weighs(PrecisionNode(f"precision of {node.name}", prior_precision=10, sd=0.1, correlation_time=0.2), node)
    return graph


def _flow(x, v, theta):
    return -0.2 * x * (1 + theta.sum(-1, keepdim=True)) + v


def _mapping(x, v, theta):
    return x * theta


@functools.cache
def stack_run(samples=40, levels=2):
    generator = torch.Generator().manual_seed(0)
    data = {"y": torch.randn(samples, 2, generator=generator).double(), "u": torch.ones(samples, 1).double()}
    return stack(levels).run(data, pc.odem(every=10), record=pc.Record.flow())


def repeated(result, times):
    """A longer result, made by repeating what a shorter one holds."""
    step = result.times[1] - result.times[0]
    return Result(
        traces={k: Trace(np.concatenate([t.values] * times), t.dims) for k, t in result.traces.items()},
        batch_shape=(),
        times=step * np.arange(len(result.times) * times),
        free_action=result.free_action * times,
        fallbacks={},
        observations=result.observations * times,
        roles=result.roles,
        graph=result.graph,
        schedule=result.schedule,
        structure=result.structure,
    )


EVIL = ["<script>alert(1)<", "</script><img src=x onerror=alert(1)>".replace("/", "∕"), "&lt;b&gt; \" ' @@data@@"]


def hostile_graph():
    x = GeneralisedStateNode(EVIL[0], dim=1, orders=2, flow=lambda x, theta: -x)
    y = SensoryNode(EVIL[1], dim=1, orders=1, dt=0.1)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.weighs(PrecisionNode(EVIL[2], prior_precision=1, sd=0.1, correlation_time=0.1), y)
    graph.weighs(PrecisionNode("<!--", prior_precision=1, sd=0.1, correlation_time=0.1), x)
    return graph

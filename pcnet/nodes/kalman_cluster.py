"""States in one joint belief: a Kalman state, the causes that drive it, and those that drive these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.functions.base import Function
from pcnet.functions.joint import JointFunction, JointPart
from pcnet.model.context import Neighbours
from pcnet.model.links import Drives, Parametrises, Predicts
from pcnet.model.node import AnyNode, BatchSpec
from pcnet.nodes.kalman_cause import KalmanCauseNode
from pcnet.numerics.trees import spans


class Cluster(NamedTuple):
    """The nodes of a joint belief, and flow and mappings as functions of all their values."""

    blocks: Mapping[AnyNode, slice]  # elements of each node in the joint state, the Kalman state first
    links: Mapping[Drives, KalmanCauseNode]  # by which causes drive others of the cluster
    flow: Function
    mappings: Mapping[Predicts, Function]


def make_cluster(node: AnyNode, flow: Function, links: Neighbours) -> Cluster:
    """The cluster of a Kalman state; without causes, flow and mappings as they are."""
    drives = links.above_of(Drives)
    causes = {link: link.parent for link in drives if isinstance(link.parent, KalmanCauseNode)}
    mappings = {link: link.function for link in links.below_of(Predicts)}
    nodes = list(dict.fromkeys([node, *causes.values()]))
    blocks = dict(zip(nodes, spans(each.shape.dim for each in nodes), strict=True))
    if not causes:
        return Cluster(blocks, {}, flow, mappings)
    size = sum(each.shape.dim for each in nodes)
    inputs = [link for link in drives if link not in causes]
    columns = dict(zip(inputs, spans(link.parent.shape.dim for link in inputs), strict=True))
    width = sum(link.parent.shape.dim for link in inputs)
    timed = any(each.takes_time for each in (flow, *mappings.values(), *(cause.dynamics for cause in causes.values())))

    def places(of: AnyNode, function: Function) -> tuple[int, ...]:
        """The arguments of a function of a node among states, inputs and the time."""
        found = list(range(size)[blocks[of]])
        if function.takes_causes or function.takes_time:
            for link in (link for link in drives if link.child is of):
                inside, of_inputs = range(size), range(size, size + width)
                found += inside[blocks[link.parent]] if link in causes else of_inputs[columns[link]]
        return (*found, size + width) if function.takes_time else tuple(found)

    def joint(of: Mapping[AnyNode, Function], parametrised: AnyNode | None) -> JointFunction:
        given = links.above_of(Parametrises, parametrised)
        each = dict(zip(given, spans(link.parent.n_parameters for link in given), strict=True))
        parts = []
        for owner, function in of.items():
            own = [at for link, at in each.items() if link.child is owner]
            at = slice(own[0].start, own[-1].stop) if own else slice(0, 0)
            parts.append(JointPart(function, places(owner, function), at))
        return JointFunction(parts, bool(width), timed)

    flows: dict[AnyNode, Function] = {node: flow} | {cause: cause.dynamics for cause in causes.values()}
    return Cluster(blocks, causes, joint(flows, None), {to: joint({node: f}, to.child) for to, f in mappings.items()})


def first_values(cluster: Cluster, spec: BatchSpec) -> tuple[Tensor, Tensor]:
    """Mean and variance of the first joint state, (B, dim)."""
    means, variances = [], []
    for node in cluster.blocks:
        dim, given = node.shape.dim, node.initial_mean  # type: ignore[attr-defined]
        means.append(spec.zeros(dim) if given is None else spec.expand(given, 1))
        variances.append(spec.expand_vector(node.initial_sd, dim) ** 2)  # type: ignore[attr-defined]
    return torch.cat(means, 1), torch.cat(variances, 1)


def members(cluster: Cluster) -> list[tuple[AnyNode, slice]]:
    """Causes with their blocks."""
    return list(cluster.blocks.items())[1:]

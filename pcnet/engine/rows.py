"""The rows of a bank of hypotheses as states of a run: how they start, what they assume, and how they are copied."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from pcnet.engine.bank import Bank, Indices, Levels
from pcnet.engine.run import Run
from pcnet.engine.state import GraphState
from pcnet.model.hypotheses import Hypotheses
from pcnet.model.links import Weighs
from pcnet.model.protocols import Assumes, AssumesNoiseLevels, KeepsNoiseScales, StartsAtPeaks
from pcnet.numerics.mixtures import Peaks
from pcnet.numerics.trees import T, tree_map

RESCALED = {8: 25.0, 32: 16.0, 64: 10.0, 128: 6.0, 256: 4.0, 512: 2.5, 1024: 1.5, 2048: 1.0}
"""Observations after which fixed parts of noises are tied to what was learned of their levels, times this factor. Too
much is safe, and too little is not: then the evidence favours levels near zero."""

MOST_CONTRASTED = 4  # elements of the process noise: with many, one of them tells little of the others


def first_peaks(run: Run) -> dict[str, Peaks]:
    """The narrower beliefs that the first belief of the only state is divided into, by its name; empty if it is not."""
    starts = {name: node for name, node in run.program.nodes.items() if isinstance(node, StartsAtPeaks)}
    found = {name: node.start_peaks(run.space.contexts[name]) for name, node in starts.items() if len(starts) == 1}
    return {name: peaks for name, peaks in found.items() if peaks is not None}


def contrasted(run: Run, hypotheses: Hypotheses) -> dict[str, slice]:
    """The columns of `Levels.contrast` of precision nodes of process noise, by name.

    They have two to MOST_CONTRASTED levels together, and are run from several factors; otherwise there is none.
    """
    found, last = {}, 0
    for name, node, of_observations in _noises(run, hypotheses.told):
        if not of_observations:
            first, last = last, last + node.levels(run.program.bound[name])
            found[name] = slice(first, last)
    several = hypotheses.process_factors is None or len(hypotheses.process_factors) > 1  # otherwise the guess is sure
    return found if several and hypotheses.contrast > 1 and 2 <= last <= MOST_CONTRASTED else {}


def around_found(run: Run, hypotheses: Hypotheses) -> Hypotheses:
    """Hypotheses with fewer factors of process or of observation variances, if all of their guesses are found."""
    found: dict[bool, list[bool]] = {False: [], True: []}
    for name, _, of_observations in _noises(run, hypotheses.told):
        found[of_observations].append(name in hypotheses.guess)
    process, observations = (bool(each) and all(each) for each in found.values())
    return hypotheses.around_found(process, observations)


def start(
    run: Run,
    batch: int,
    levels: Levels,
    contrasted: Mapping[str, slice],
    peaks: Mapping[str, Peaks],
    guess: Mapping[str, Tensor],
    told: Collection[str] = (),
) -> None:
    """Let all rows of a run start at their noise levels and peaks.

    Args:
        run: A run of K·B batch elements.
        batch: B.
        levels: Noise levels of the rows.
        contrasted: Of `contrasted`.
        peaks: Of `first_peaks`.
        guess: Log-variances (B, n) of the precision nodes whose first guess is to be found.
        told: Names of precision nodes whose level is the same in all rows.
    """
    state, program, rows = run.now.state, run.program, len(levels.process)
    nodes = dict(state.nodes)
    for name, (offsets, narrowing, _) in peaks.items():
        node = program.nodes[name]
        assert isinstance(node, StartsAtPeaks)
        offset = offsets.repeat(rows // len(offsets), 1).repeat_interleave(batch, 0)
        nodes[name] = node.start_at(program.bound[name], nodes[name], offset, narrowing)
    for name, noise, of_observations in _noises(run, told):
        factors = (levels.observation if of_observations else levels.process)[:, None]
        if name in contrasted:
            factors = factors + levels.contrast[:, contrasted[name]]
        shift = torch.as_tensor(np.repeat(factors, batch, 0)).to(program.zeros)
        if name in guess:
            found = guess[name].to(shift).repeat(rows, 1)
            nodes[name] = noise.with_guess(program.bound[name], nodes[name], found)
        nodes[name] = noise.assume(program.bound[name], nodes[name], shift)
    run.replace_nodes(nodes)


def _noises(run: Run, told: Collection[str]) -> Iterator[tuple[str, AssumesNoiseLevels, bool]]:
    """Nodes whose noise levels are not told, by name, and whether it is observations that they weigh."""
    for name, node in run.program.nodes.items():
        if isinstance(node, AssumesNoiseLevels) and name not in told:
            below = run.program.model.graph.below(run.program.nodes[name])
            yield name, node, all(link.child.observes for link in below if isinstance(link, Weighs))


def assume_kinds(run: Run, hypotheses: Hypotheses, bank: Bank) -> None:
    """Let each row have the walk and the outliers that the bank says."""
    program = run.program
    rates = np.array([0.0, *(walk**2 for walk in hypotheses.walks)])[bank.walk].reshape(-1)
    shares = (hypotheses.outliers * bank.robust).reshape(-1)
    values = {
        "walk": torch.as_tensor(rates).to(program.zeros) / program.interval,
        "outliers": torch.as_tensor(shares).to(program.zeros),
    }
    nodes = {}
    for name, node in program.nodes.items():
        if isinstance(node, Assumes) and node.assumption in values:
            nodes[name] = node.assume(program.bound[name], run.node_state(name), values[node.assumption])
    run.replace_nodes(nodes)


def has_walks(run: Run) -> bool:
    """Whether there are parameters that can walk."""
    return any(isinstance(node, Assumes) and node.assumption == "walk" for node in run.program.nodes.values())


def has_scales(run: Run) -> bool:
    """Whether there are parts of noises with a fixed scale."""
    return bool(_scaled(run))


def _scaled(run: Run) -> dict[str, KeepsNoiseScales]:
    nodes = {name: node for name, node in run.program.nodes.items() if isinstance(node, KeepsNoiseScales)}
    return {name: node for name, node in nodes.items() if node.has_scales(run.program.bound[name])}


def rescale(run: Run, weights: Tensor, factor: float) -> None:
    """Tie parts of noises with a fixed scale to what was learned of their levels so far.

    weights: of the rows, (K, B).
    """
    bound = run.program.bound
    found = {
        name: node.rescaled(bound[name], run.node_state(name), weights, factor) for name, node in _scaled(run).items()
    }
    run.replace_nodes(found)


def places(source: Indices) -> Tensor:
    """The batch elements (K·B,) from which those of another bank continue, given the row (K, B) of each."""
    batch = source.shape[1]
    return torch.as_tensor(source * batch + np.arange(batch)).reshape(-1)


def copies(state: GraphState, index: Tensor) -> GraphState:
    """Copies of some batch elements of a state."""
    nodes = {name: picked(each, index) for name, each in state.nodes.items()}
    return GraphState(nodes, *picked(tuple(state[1:]), index))


def picked(tree: T, index: Tensor) -> T:
    """Copies of some batch elements of a tree of tensors."""
    return tree_map(lambda value: value[index].contiguous(), tree)

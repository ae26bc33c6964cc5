"""The future of a run, one step at a time: tensors that move, and what is shown of them.

A step is a pure function of tensors, so that a loop in Python and one in machine code can take it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pcnet.engine.program import Program
from pcnet.engine.state import GraphState
from pcnet.engine.tick import Workspace
from pcnet.errors import GraphError
from pcnet.functions.traced import jacobian_of
from pcnet.functions.tracing import trace
from pcnet.model.context import NodeContext, Now
from pcnet.model.links import AnyLink, Drives, Predicts
from pcnet.model.messages import PointPrediction
from pcnet.model.protocols import DrawsFutures, ForecastContext, Forecasts, ForecastsAlone
from pcnet.numerics.kernels import Kernel, White
from pcnet.numerics.trees import flatten, unflatten

NEGLIGIBLE = 1e-10  # correlations of noise below this are neglected
TRACED_AFTER = 4  # steps of a linearised system after which its flow is traced: that takes as long as some of them
STEP, NOISE, INPUT, OVER = "/step", "/noise", "/input ", "/input over "
"""What a step is given: its length (B,), for draws the noise (B, m); and of inputs that are known ahead, by name, their
value at its end, and a constant one over the step."""
Moving = Mapping[str, Tensor]


class Future(ABC):
    """What a run would do without observations.

    `moving` tensors (B, ...) by name; some of them may stand still.
    """

    def __init__(self, program: Program, state: GraphState) -> None:
        self.program = program
        self.space = Workspace(program, state)
        self.space.load(state.nodes, Now(state.time, state.dt, None))

    def inputs(self, name: str, given: Mapping[str, Tensor], key: str) -> dict[AnyLink, PointPrediction]:
        """Messages of inputs that are known ahead, for a node."""
        batch, found = self.program.spec.batch, {}
        for link in self.space.contexts[name].above_of(Drives):
            value = given.get(key + link.parent.name)
            if value is not None:
                found[link] = PointPrediction(value[:batch, None])
        return found  # type: ignore[return-value]

    @abstractmethod
    def step(self, moving: Moving, given: Mapping[str, Tensor]) -> Moving:
        """The moving tensors one step later."""

    @abstractmethod
    def show(self, moving: Moving, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is shown of them: mean/node, sd/node, (B, dim) each."""


FutureMaker = Callable[[Program, GraphState], Future]


def forecasts_alone(program: Program) -> str | None:
    """The name of the only state, if it can forecast itself."""
    graph = program.model.graph
    states = graph.belief_holders
    stacked = any(isinstance(link, Predicts) and not link.child.observes for link in graph.links)
    if len(states) != 1 or stacked or bool((program.interval != program.interval[0]).any()):
        return None
    return states[0].name if isinstance(states[0], ForecastsAlone) else None


def draws_alone(program: Program, context: Callable[[str], NodeContext[Any, Any]]) -> str | None:
    """The name of the only state, if it can draw its future; context: of a node by name."""
    name = forecasts_alone(program)
    node = None if name is None else program.nodes[name]
    return name if name is not None and isinstance(node, DrawsFutures) and node.draws(context(name)) else None


class FutureOfOne(Future):
    """The future of a single state that forecasts itself, including noise that persists."""

    def __init__(self, program: Program, state: GraphState, *, parameters: bool) -> None:
        super().__init__(program, state)
        name = forecasts_alone(program)
        assert name is not None
        node = program.nodes[name]
        assert isinstance(node, ForecastsAlone)
        self.name, self.node, self.parameters = name, node, parameters
        self.context = self.space.contexts[name]

    def start(self, step: float, most: int) -> Moving:
        """The beginning, whatever the step."""
        return flatten(self.node.forecast_state(self.context, self.parameters), "/future")

    def _at(self, moving: Moving, given: Mapping[str, Tensor]) -> NodeContext[Any, Any]:
        state = unflatten(self.context.state, "/future", dict(moving))
        step, now = given[STEP], self.context.time
        inputs = self.inputs(self.name, given, INPUT)
        return self.context.at(state, Now(now, step, step / self.program.interval), inputs)

    def step(self, moving: Moving, given: Mapping[str, Tensor]) -> Moving:
        return flatten(self.node.forecast_step(self._at(moving, given)), "/future")

    def show(self, moving: Moving, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = self.node.forecast_shown(self._at(moving, given), self.parameters)
        shown: dict[str, Tensor] = {}
        own = found.mean, found.covariance.diagonal(dim1=-2, dim2=-1)
        for name, (mean, variance) in {self.name: own, **found.below}.items():
            shown[f"mean/{name}"] = mean
            shown[f"sd/{name}"] = variance.clamp_min(0).sqrt()
        return shown


class PointsOfOne(Future):
    """Points of the belief of a single state, which move with given noise."""

    def __init__(self, program: Program, state: GraphState) -> None:
        super().__init__(program, state)
        name = draws_alone(program, self.space.contexts.__getitem__)
        assert name is not None
        node = program.nodes[name]
        assert isinstance(node, DrawsFutures)
        self.name, self.node = name, node
        self.context = self.space.contexts[name]

    def start(self, normal: Tensor, parameters: bool) -> Moving:
        """The beginning of copies of all batch elements, one after the other, from normal numbers (copies · B, n)."""
        points = self.node.points(self.context, self._apart(normal), parameters)
        time = self.context.time.repeat(len(normal) // self.program.spec.batch)
        return {"/points": self._together(points), "/time": time}

    def _apart(self, value: Tensor) -> Tensor:
        """(copies · B, n) as (B, copies, n)."""
        return value.reshape(-1, self.program.spec.batch, value.shape[-1]).transpose(0, 1)

    def _together(self, value: Tensor) -> Tensor:
        return value.transpose(0, 1).reshape(-1, value.shape[-1])

    def _at(self, time: Tensor, given: Mapping[str, Tensor], key: str) -> NodeContext[Any, Any]:
        batch = self.program.spec.batch
        step, inputs = given[STEP][:batch], self.inputs(self.name, given, key)
        return self.context.at(self.context.state, Now(time[:batch], step, step / self.program.interval), inputs)

    def step(self, moving: Moving, given: Mapping[str, Tensor]) -> Moving:
        time = moving["/time"] + given[STEP]
        points, noise = self._apart(moving["/points"]), self._apart(given[NOISE])
        moved = self.node.move_points(self._at(time, given, OVER), points, noise)
        return {"/points": self._together(moved), "/time": time}

    def show(self, moving: Moving, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = self.node.values_of(self._at(moving["/time"], given, INPUT), self._apart(moving["/points"]))
        return {f"mean/{name}": self._together(value) for name, value in found.items()}


class NoiseSource(NamedTuple):
    """One noise of the system."""

    place: slice  # among the noise inputs
    covariance: Tensor  # (B, m, m)
    kernel: Kernel
    hold: Tensor  # how long white noise is held constant, (B,); 1 for a diffusion, whose covariance is per unit of time


class System:
    """The variables of all nodes that take part in a forecast, in one vector z.

    `flow` is ż (B, n) as a function of z and the noise inputs, `values` what is shown of z, without observation noise.
    Each node contributes its part from the messages of the nodes above it. With `copies`, everything exists so many
    times, copy by copy.
    """

    def __init__(self, space: Workspace, copies: int = 1, parameters: bool = True) -> None:
        program, graph = space.program, space.program.model.graph
        order = graph.topological_order
        self.nodes, self.copies = {name: node for name, node in order.items() if isinstance(node, Forecasts)}, copies
        self.contexts: dict[str, NodeContext[Any, Any]] = space.contexts
        self.places: dict[str, slice] = {}
        means, covariances, first = [], [], 0
        for name, node in self.nodes.items():
            start = node.forecast_start(self.contexts[name])
            if start is not None:
                mean, covariance = self.repeated(start.mean), self.repeated(start.covariance)
                known = order[name].role == "parameter" and not parameters
                means.append(mean)
                covariances.append(torch.zeros_like(covariance) if known else covariance)
                self.places[name] = slice(first, first := first + mean.shape[-1])
        if not any(order[name].role == "state" for name in self.places):
            raise GraphError("there is no state in the graph that can be forecast")
        self.is_timed = program.depends_on_time
        if self.is_timed:  # the time is the last variable, and has the velocity 1
            means.append(self.repeated(space.now.time.to(means[0])[:, None]))
        self.mean = torch.cat(means, -1)
        self.covariance = torch.zeros_like(self.mean).diag_embed()
        for place, covariance in zip(self.places.values(), covariances, strict=True):
            self.covariance[:, place, place] = covariance
        self.sources: list[NoiseSource] = []
        self._inputs: dict[str, list[slice]] = {name: [] for name in self.nodes}
        self.noises = 0
        for name, node in self.nodes.items():
            held = program.interval * program.period(name, "predict")
            hold = self.repeated(held if node.holds_noise else torch.ones_like(held))
            for covariance, kernel in self.noises_of(name) if order[name].is_input or not order[name].observes else []:
                here = slice(self.noises, self.noises + covariance.shape[-1])
                self._inputs[name].append(here)
                self.sources.append(NoiseSource(here, covariance, kernel, hold))
                self.noises = here.stop
        shown = self.values(self.mean)
        self.states = [name for name, node in graph.nodes.items() if name in shown and not node.observes]
        self.sensors = [name for name, node in graph.nodes.items() if name in shown and node.observes]

    def repeated(self, value: Tensor) -> Tensor:
        return value.clone().repeat(self.copies, *(1,) * (value.dim() - 1))

    def noises_of(self, name: str) -> list[tuple[Tensor, Kernel]]:
        """The covariance of each noise of a node at one time (B, m, m), and its autocorrelation."""
        found = self.nodes[name].forecast_noises(self.contexts[name])
        return [(self.repeated(covariance), kernel) for covariance, kernel in found]

    def at(self, z: Tensor, noise: Tensor | None = None) -> dict[str, ForecastContext]:
        """The future z as each node sees it."""
        found: dict[str, ForecastContext] = {}
        for name in self.nodes:
            messages = {}
            for link in self.contexts[name].above:
                sender = link.parent.name
                if sender in self.nodes:
                    messages[link] = self.nodes[sender].forecast_message(self.contexts[sender], link, found[sender])
            inputs = [] if noise is None else [noise[..., place] for place in self._inputs[name]]
            total = sum(inputs[1:], inputs[0]) if inputs else z.new_zeros(())
            time = z[..., -1:] if self.is_timed else None
            found[name] = ForecastContext(z[..., self.places.get(name, slice(0))], total, messages, time)
        return found

    def offset(self, z: Tensor) -> Tensor:
        """z in coordinates in which variables without a velocity of their own stand still."""
        now = self.at(z)
        found = [self.nodes[name].offset(self.contexts[name], now[name]) for name in self.places]
        return torch.cat([*found, z[..., -1:]] if self.is_timed else found, -1)

    def flow(self, z: Tensor, noise: Tensor) -> Tensor:
        now = self.at(z, noise)
        found = [self.nodes[name].velocity(self.contexts[name], now[name]) for name in self.places]
        return torch.cat([*found, torch.ones_like(z[..., -1:])] if self.is_timed else found, -1)

    def values(self, z: Tensor) -> dict[str, Tensor]:
        """What forecasts show, by node."""
        now = self.at(z)
        shown = {name: node.forecast_value(self.contexts[name], now[name]) for name, node in self.nodes.items()}
        return {name: value for name, value in shown.items() if value is not None}


class FutureOfSystem(Future):
    """Mean and covariance of a system along its flow, linearised, with its noises.

    The effect of past noise on z is carried, the newest first: (B, cells, n, m) of each noise that lasts.
    """

    def __init__(self, program: Program, state: GraphState, *, parameters: bool) -> None:
        super().__init__(program, state)
        self.system = System(self.space, parameters=parameters)
        self._steps = 0
        self._traced: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

    def start(self, step: float, most: int) -> Moving:
        """The beginning; step: length of a step. most: number of steps."""
        system = self.system
        turned = jacobian_of(system.offset, system.mean)
        z, covariance = system.offset(system.mean), turned @ system.covariance @ turned.mT
        moving = {"/z": z, "/covariance": covariance}
        for i, source in enumerate(system.sources):
            # a power of two, so that forecasts of similar lengths share their compiled step
            weights = cells(source.kernel, step, 1 << (most - 1).bit_length(), source.hold)
            moving[f"/weights {i}"] = weights.mT.expand(len(z), -1).contiguous()
            if len(weights) > 1:
                size = len(weights) - 1, z.shape[-1], source.covariance.shape[-1]
                moving[f"/carried {i}"] = z.new_zeros(len(z), *size)
        return moving

    def step(self, moving: Moving, given: Mapping[str, Tensor]) -> Moving:
        system, z, covariance = self.system, moving["/z"], moving["/covariance"]
        nothing = z.new_zeros(z.shape[0], system.noises)
        eye = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)

        def flow(at: Tensor) -> tuple[Tensor, Tensor]:
            return system.flow(at, nothing), jacobian_of(lambda v: system.flow(v, nothing), at)

        self._steps += 1
        if self._steps == TRACED_AFTER:
            with suppress(GraphError):  # what cannot be traced is called at each step
                self._traced = trace(flow, (z,))
        middle, after, transition = _runge_kutta(self._traced or flow, z, given[STEP])
        gain = 0.5 * (eye + transition) @ jacobian_of(lambda e: system.flow(middle, e), nothing)
        covariance = transition @ covariance @ transition.mT
        made = {"/z": after}
        for i, source in enumerate(system.sources):
            weights = made[f"/weights {i}"] = moving[f"/weights {i}"]
            new = gain[..., source.place]
            pushed = new @ source.covariance
            covariance = covariance + weights[:, 0, None, None] * (pushed @ new.mT)
            if weights.shape[1] > 1:
                past = transition[:, None] @ moving[f"/carried {i}"]
                cross = (weights[:, 1:, None, None] * past).sum(1) @ pushed.mT
                covariance = covariance + cross + cross.mT
                made[f"/carried {i}"] = torch.cat([new[:, None], past[:, :-1]], 1)
        return made | {"/covariance": covariance}

    def show(self, moving: Moving, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        system, shown = self.system, dict[str, Tensor]()
        for name, value in system.values(moving["/z"]).items():
            seen = jacobian_of(lambda v, of=name: system.values(v)[of], moving["/z"])  # type: ignore[misc]
            spread = (seen @ moving["/covariance"] * seen).sum(-1)
            if name in system.sensors and (noises := system.noises_of(name)):
                spread = spread + noises[0][0].diagonal(dim1=-2, dim2=-1)
            shown |= {f"mean/{name}": value, f"sd/{name}": spread.clamp_min(0).sqrt()}
        return shown


class Path(Future):
    """One path of the system, with given noise."""

    def __init__(self, program: Program, state: GraphState, *, copies: int = 1) -> None:
        super().__init__(program, state)
        self.system = System(self.space, copies=copies)

    def step(self, moving: Moving, given: Mapping[str, Tensor]) -> Moving:
        z, noise, h, flow = moving["/z"], given[NOISE], given[STEP][:, None], self.system.flow
        k1 = flow(z, noise)
        k2 = flow(z + 0.5 * h * k1, noise)
        k3 = flow(z + 0.5 * h * k2, noise)
        return {"/z": z + h / 6 * (k1 + 2 * k2 + 2 * k3 + flow(z + h * k3, noise))}

    def show(self, moving: Moving, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {f"mean/{name}": value for name, value in self.system.values(moving["/z"]).items()}


def cells(kernel: Kernel, step: float, most: int, hold: Tensor) -> Tensor:
    """Covariances ∫∫κ of a noise of variance 1, integrated over time cells that are j apart; (cells, B or 1)."""
    if isinstance(kernel, White):
        return (step * hold)[None]
    nodes, weights = np.polynomial.legendre.leggauss(24)
    half = hold.new_tensor((nodes + 1) / 2 * step)  # (h − u) κ(jh ± u) over u in (0, h), smooth on either side
    weigh = hold.new_tensor(weights / 2 * step) * (step - half)
    found: list[Tensor] = []
    for j in range(most):
        lags = torch.stack([j * step + half, (j * step - half).abs()])
        value = (kernel.correlation(lags[..., None]) * weigh[:, None]).sum((0, 1))
        if found and bool((value.abs() <= NEGLIGIBLE * found[0].abs()).all()):
            break
        found.append(value)
    return torch.stack(found)


def _runge_kutta(
    flow: Callable[[Tensor], tuple[Tensor, Tensor]], z: Tensor, step: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """z after half a step and after a full step (B,), and the Jacobian of the full step.

    flow: Gives the velocity and its Jacobian.
    """
    eye = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device).expand(z.shape[0], -1, -1)
    h, hh = step[:, None], step[:, None, None]
    k1, m1 = flow(z)
    k2, slope = flow(z + 0.5 * h * k1)
    m2 = slope @ (eye + 0.5 * hh * m1)
    middle = z + 0.5 * h * k2
    k3, slope = flow(middle)
    m3 = slope @ (eye + 0.5 * hh * m2)
    k4, slope = flow(z + h * k3)
    m4 = slope @ (eye + hh * m3)
    after = z + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return middle, after, eye + hh / 6 * (m1 + 2 * m2 + 2 * m3 + m4)

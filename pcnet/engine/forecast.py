"""Forecasts with growing intervals, draws from the model, and innovations.

The graph is read as ẋ = f(x, v, θ) + ω, y = g(x, v, θ) + ω_y with smooth noises ω, whose variance and autocorrelation
come from the precision nodes. States start at their beliefs, parameters stay at theirs, causes are their predictions
plus noise, and inputs hold. Parameters that a state above predicts move with it, at their present distance. A single
Kalman state forecasts itself, including noise that persists; draws, and forecasts of several states, start with new
noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pcnet.errors import DivergenceError, GraphError, ResultError, SettingError
from pcnet.functions.traced import jacobian_of
from pcnet.model.context import NodeContext
from pcnet.model.links import Predicts
from pcnet.model.protocols import ForecastContext, Forecasts, ForecastsAlone, ForecastsObservations
from pcnet.numerics.kernels import Kernel, White
from pcnet.results.downsample import Array
from pcnet.results.result import Interval

if TYPE_CHECKING:
    import pandas as pd

    from pcnet.engine.session import Session

SUBSTEPS = 4  # smallest number of integration steps in a sampling interval
MAX_STEPS = 4000  # largest number of steps for which noise is drawn: its covariance over all of them is a matrix
NEGLIGIBLE = 1e-10  # correlations of noise below this are neglected


class Forecast:
    """Means and standard deviations of future states and observations, (..., time, dim), batch leading."""

    def __init__(self, times: Array, means: Mapping[str, Array], sds: Mapping[str, Array]) -> None:
        self.times = times
        """In the time of the run: the first is one step after the last observation."""
        self._means, self._sds = dict(means), dict(sds)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes that are forecast."""
        return tuple(self._means)

    def mean(self, node: str) -> Array:
        return self._of(self._means, node)

    def sd(self, node: str) -> Array:
        """Standard deviation of a state, or of an observation including its noise."""
        return self._of(self._sds, node)

    def interval(self, node: str, probability: float = 0.95) -> Interval:
        """The central interval that contains the state or the observation with this probability."""
        return Interval.normal(self.mean(node), self.sd(node), probability)

    def to_dataframe(self) -> pd.DataFrame:
        """A long table: time, node, dimension, batch…, mean, sd."""
        import pandas as pd

        parts = []
        for node, mean in self._means.items():
            batch = [f"batch_{i}" for i in range(mean.ndim - 2)]
            index = np.indices(mean.shape).reshape(mean.ndim, -1)
            columns = dict(zip([*batch, "time", "dimension"], index, strict=True))
            columns["time"] = self.times[columns["time"]]
            values = {"mean": mean.reshape(-1), "sd": self._sds[node].reshape(-1)}
            parts.append(pd.DataFrame(columns | values).assign(node=node))
        table = pd.concat(parts, ignore_index=True)
        first = ["time", "node", "dimension"]
        return table[[*first, *(c for c in table.columns if c not in (*first, "mean", "sd")), "mean", "sd"]]

    def _of(self, values: Mapping[str, Array], node: str) -> Array:
        if node not in values:
            raise ResultError(f"there is no forecast of {node!r}; there is one of {', '.join(values)}")
        return values[node]


class Draws(NamedTuple):
    """Times, and drawn values of each state and sensory node, (draws, ..., time, dim)."""

    times: Array
    values: dict[str, Array]


class Innovation(NamedTuple):
    """The difference of an observation from its forecast, and its standard deviation; (..., dim)."""

    error: Array
    sd: Array


def forecast(session: Session, horizon: float, every: float | None = None, *, parameters: bool = True) -> Forecast:
    """Means and standard deviations at every `every` until `horizon` from now; see `Live.forecast`."""
    every, count = _grid(session, horizon, every)
    with torch.inference_mode(False), torch.no_grad():
        found = _forecast_alone(session, every, count, parameters)
        if found is not None:
            means = {name: torch.stack([each[name][0] for each in found]) for name in found[0]}
            spread = {name: torch.stack([each[name][1] for each in found]) for name in found[0]}
            sds = {name: each.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt() for name, each in spread.items()}
        else:
            system = System(session, parameters=parameters)
            means, sds = _propagate(system, every, count, _substeps(session, every))
        for name, node in session.graph.nodes.items():
            if isinstance(node, ForecastsObservations) and name in means:
                mean, variance = node.forecast_observation(session.context(name), means[name], sds[name] ** 2)
                means[name], sds[name] = mean, variance.sqrt()
    times = session.time + every * np.arange(1, count + 1)
    shape = tuple(session.program.spec.batch_shape)
    _check_finite(means | {f"{name} (sd)": sd for name, sd in sds.items()}, times)
    return Forecast(times, _arrays(means, shape), _arrays(sds, shape))


def _forecast_alone(
    session: Session, every: float, count: int, parameters: bool
) -> list[dict[str, tuple[Tensor, Tensor]]] | None:
    """Mean and covariance by node at each time, if there is a single state that can forecast itself."""
    graph = session.graph
    states = [node for node in graph.nodes.values() if node.role == "state"]
    stacked = any(isinstance(link, Predicts) and not link.child.observes for link in graph.links)
    if len(states) != 1 or stacked or bool((session.intervals != session.intervals[0]).any()):
        return None
    name, state = states[0].name, states[0]
    if not isinstance(state, ForecastsAlone):
        return None
    steps = max(1, round(every / session.interval))  # of about the sampling interval
    with torch.inference_mode():
        step = torch.full_like(session.intervals, every / steps)
        found = state.forecast(session.context(name), step, steps, count, parameters)
    return [{name: (each.mean, each.covariance), **each.below} for each in found]


def draw(session: Session, horizon: float, draws: int, every: float | None, seed: int) -> Draws:
    """Draws from the model that the graph is; see `Live.sample`."""
    every, count = _grid(session, horizon, every)
    if type(draws) is not int or draws < 1:
        raise SettingError(f"draws must be a whole number, 1 or more, not {draws!r}")
    substeps = _substeps(session, every)
    if count * substeps > MAX_STEPS:
        raise SettingError(f"{count * substeps} steps are too many to draw noise for; use a shorter horizon")
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode(False), torch.no_grad():
        values = _simulate(System(session, copies=draws), every, count, substeps, generator)
        for name, node in session.graph.nodes.items():
            if isinstance(node, ForecastsObservations) and name in values:
                values[name] = node.draw_observation(session.context(name), values[name], generator)
    times = session.time + every * np.arange(1, count + 1)
    _check_finite(values, times)
    return Draws(times, _arrays(values, (draws, *session.program.spec.batch_shape)))


def innovation(session: Session, observation: Mapping[str, Tensor], t: float | None) -> dict[str, Innovation]:
    """Errors of one-step forecasts; NaN where an observation is missing."""
    wait = _interval(session) if t is None else t - session.time
    expected = session.forecast(wait, wait)
    found = {}
    for name, value in observation.items():
        if name in expected._means and expected.mean(name).shape[-1] == value.shape[-1]:
            mean, sd = expected.mean(name)[..., 0, :], expected.sd(name)[..., 0, :]
            seen = value[..., : mean.shape[-1]].cpu().numpy()
            found[name] = Innovation(seen - mean, np.where(np.isnan(seen), np.nan, sd))
    return found


def _grid(session: Session, horizon: float, every: float | None) -> tuple[float, int]:
    every = _interval(session) if every is None else every
    for name, value in (("horizon", horizon), ("every", every)):
        number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
        if not number or not 0 < value < 1e300:
            raise SettingError(f"{name} must be a positive, finite time, not {value!r}")
    count = round(horizon / every)
    if count < 1 or count > 1_000_000:
        raise SettingError(f"a horizon of {horizon:g} at every {every:g} is {count} times; give 1 to a million")
    return float(every), count


def _interval(session: Session) -> float:
    if bool((session.intervals != session.intervals[0]).any()):
        raise SettingError("batch elements have sampling intervals of their own: give `every`, or a time t, for all")
    return session.interval


def _substeps(session: Session, every: float) -> int:
    return max(1, math.ceil(SUBSTEPS * every / float(session.intervals.min()) - 1e-9))


def _arrays(values: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Array]:
    """(T, B, dim) as (..., T, dim)."""
    return {name: v.movedim(0, 1).reshape(*shape, *v.shape[:1], *v.shape[2:]).numpy() for name, v in values.items()}


def _check_finite(values: Mapping[str, Tensor], times: Array) -> None:
    for name, value in values.items():
        good = torch.isfinite(value).flatten(1).all(1)
        if not bool(good.all()):
            when = float(times[int((~good).nonzero()[0])])
            raise DivergenceError(f"the forecast of {name} is not finite from t = {when:g} on; use a shorter horizon")


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

    def __init__(self, session: Session, copies: int = 1, parameters: bool = True) -> None:
        order = session.graph.topological_order
        self.nodes, self.copies = {name: node for name, node in order.items() if isinstance(node, Forecasts)}, copies
        self.contexts: dict[str, NodeContext[Any, Any]] = {name: session.context(name) for name in order}
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
        self.is_timed = session.program.depends_on_time
        if self.is_timed:  # the time is the last variable, and has the velocity 1
            means.append(self.repeated(session.state.time.to(means[0])[:, None]))
        self.mean = torch.cat(means, -1)
        self.covariance = torch.zeros_like(self.mean).diag_embed()
        for place, covariance in zip(self.places.values(), covariances, strict=True):
            self.covariance[:, place, place] = covariance
        self.sources: list[NoiseSource] = []
        self._inputs: dict[str, list[slice]] = {name: [] for name in self.nodes}
        self.noises = 0
        for name, node in self.nodes.items():
            held = session.intervals * session.program.period(name, "predict")
            hold = self.repeated(held if node.holds_noise else torch.ones_like(held))
            for covariance, kernel in self.noises_of(name) if order[name].is_input or not order[name].observes else []:
                here = slice(self.noises, self.noises + covariance.shape[-1])
                self._inputs[name].append(here)
                self.sources.append(NoiseSource(here, covariance, kernel, hold))
                self.noises = here.stop
        shown = self.values(self.mean)
        self.states = [name for name, node in session.graph.nodes.items() if name in shown and not node.observes]
        self.sensors = [name for name, node in session.graph.nodes.items() if name in shown and node.observes]

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


def _cells(kernel: Kernel, step: float, most: int, hold: Tensor) -> Tensor:
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


def _propagate(system: System, every: float, count: int, substeps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Mean and covariance along the flow, linearised, with its noises; (T, B, dim) of each state and sensor."""
    step = every / substeps
    turned = jacobian_of(system.offset, system.mean)
    z, covariance = system.offset(system.mean), turned @ system.covariance @ turned.mT
    nothing = z.new_zeros(z.shape[0], system.noises)
    lags = [_cells(source.kernel, step, count * substeps, source.hold) for source in system.sources]
    # the effect of past noise, the newest first: (cells, B, n, m)
    carried = [z.new_zeros(0, *z.shape, source.covariance.shape[-1]) for source in system.sources]
    own = {name: noises[0][0] for name in system.sensors if (noises := system.noises_of(name))}
    means: dict[str, list[Tensor]] = {name: [] for name in [*system.states, *system.sensors]}
    sds: dict[str, list[Tensor]] = {name: [] for name in means}
    eye = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)

    def slope(at: Tensor) -> Tensor:
        return jacobian_of(lambda v: system.flow(v, nothing), at)

    for k in range(count * substeps):
        middle, after, transition = _runge_kutta(lambda v: system.flow(v, nothing), slope, z, step)
        gain = jacobian_of(lambda e, at=middle: system.flow(at, e), nothing)  # type: ignore[misc]
        gain = 0.5 * (eye + transition) @ gain
        covariance = transition @ covariance @ transition.mT
        for i, (source, weights) in enumerate(zip(system.sources, lags, strict=True)):
            past = transition @ carried[i][: len(weights) - 1]
            new = gain[..., source.place]
            pushed = new @ source.covariance
            cross = (weights[1 : len(past) + 1, :, None, None] * past).sum(0) @ pushed.mT
            covariance = covariance + weights[0][:, None, None] * (pushed @ new.mT) + cross + cross.mT
            carried[i] = torch.cat([new[None], past])
        z = after
        if (k + 1) % substeps == 0:
            for name, value in system.values(z).items():
                seen = jacobian_of(lambda v, of=name: system.values(v)[of], z)  # type: ignore[misc]
                spread = (seen @ covariance * seen).sum(-1)
                spread = spread + own[name].diagonal(dim1=-2, dim2=-1) if name in own else spread
                means[name].append(value)
                sds[name].append(spread.clamp_min(0).sqrt())
    return {n: torch.stack(v) for n, v in means.items()}, {n: torch.stack(v) for n, v in sds.items()}


def _runge_kutta(
    flow: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor], z: Tensor, step: float
) -> tuple[Tensor, Tensor, Tensor]:
    """z after half a step and after a full step, and the Jacobian of the full step."""
    eye = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device).expand(z.shape[0], -1, -1)
    k1, m1 = flow(z), slope(z)
    at = z + 0.5 * step * k1
    k2, m2 = flow(at), slope(at) @ (eye + 0.5 * step * m1)
    middle = z + 0.5 * step * k2
    k3, m3 = flow(middle), slope(middle) @ (eye + 0.5 * step * m2)
    at = z + step * k3
    k4, m4 = flow(at), slope(at) @ (eye + step * m3)
    after = z + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return middle, after, eye + step / 6 * (m1 + 2 * m2 + 2 * m3 + m4)


def _simulate(system: System, every: float, count: int, substeps: int, generator: torch.Generator) -> dict[str, Tensor]:
    """One path for each batch element and copy; (T, B, dim) of each state and sensor."""
    step, steps = every / substeps, count * substeps
    values, vectors = torch.linalg.eigh(system.covariance)  # singular where something is known exactly
    start = vectors * values.clamp_min(0).sqrt()[:, None, :]
    white = torch.randn(*system.mean.shape, 1, generator=generator, dtype=system.mean.dtype).to(system.mean.device)
    z = system.offset(system.mean + (start @ white)[..., 0])
    noise = z.new_zeros(steps, z.shape[0], system.noises)
    for source in system.sources:
        weights = _cells(source.kernel, step, steps, source.hold) / step**2
        noise[..., source.place] = _coloured(weights, steps, source.covariance, generator)
    found: dict[str, list[Tensor]] = {name: [] for name in [*system.states, *system.sensors]}
    for k in range(steps):
        now = noise[k]
        k1 = system.flow(z, now)
        k2 = system.flow(z + 0.5 * step * k1, now)
        k3 = system.flow(z + 0.5 * step * k2, now)
        z = z + step / 6 * (k1 + 2 * k2 + 2 * k3 + system.flow(z + step * k3, now))
        if (k + 1) % substeps == 0:
            for name, value in system.values(z).items():
                found[name].append(value)
    paths = {name: torch.stack(path) for name, path in found.items()}
    for name in system.sensors:
        for covariance, kernel in system.noises_of(name):  # none with a likelihood of its own
            weights = kernel.correlation(every * torch.arange(count, dtype=z.dtype)[:, None])
            paths[name] = paths[name] + _coloured(weights, count, covariance, generator)
    return paths


def _coloured(weights: Tensor, steps: int, covariance: Tensor, generator: torch.Generator) -> Tensor:
    """Noise of a covariance (B, m, m) at one time and correlations (lags, B or 1) in time; (steps, B, m)."""
    lags = torch.arange(steps)
    apart = (lags[:, None] - lags).abs()
    padded = torch.cat([weights, weights.new_zeros(steps, weights.shape[1])])[:steps]
    values, vectors = torch.linalg.eigh(padded[apart].movedim(-1, 0))
    root = vectors * values.clamp_min(0).sqrt()[:, None, :]  # (B or 1, steps, steps)
    batch, m, _ = covariance.shape
    white = torch.randn(batch, steps, m, generator=generator, dtype=covariance.dtype).to(covariance.device)
    smooth = (root @ white.view(-1, root.shape[0], steps, m)).view(batch, steps, m)  # copy by copy of a batch
    return (smooth @ torch.linalg.cholesky(covariance).mT).movedim(0, 1)  # type: ignore[no-any-return]

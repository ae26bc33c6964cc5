"""Forecasts with growing intervals, draws from the model, and innovations.

The graph is read as ẋ = f(x, v, θ) + ω, y = g(x, v, θ) + ω_y with smooth noises ω, whose variance and autocorrelation
come from the precision nodes. States start at their beliefs, parameters stay at theirs, causes are their predictions
plus noise, and inputs hold. Parameters that a state above predicts move with it, at their present distance. A single
Kalman state forecasts itself, including noise that persists: by its Gaussian belief where an ensemble of points
confirms it, otherwise by the ensemble. Forecasts and draws of several states start with new noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pcnet.engine.ensemble import Ensemble, Moments
from pcnet.engine.future import (
    INPUT,
    NOISE,
    OVER,
    STEP,
    Future,
    FutureMaker,
    FutureOfOne,
    FutureOfSystem,
    Moving,
    Path,
    PointsOfOne,
    cells,
    draws_alone,
    forecasts_alone,
)
from pcnet.errors import DivergenceError, ResultError, SettingError
from pcnet.guidance import Guided, instead
from pcnet.model.protocols import DrawsFutures, ForecastsObservations
from pcnet.results.downsample import Array
from pcnet.results.result import Interval

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from pcnet.engine.session import Session
    from pcnet.results.result import Result

SUBSTEPS = 4  # smallest number of integration steps in a sampling interval
MAX_STEPS = 4000  # largest number of steps for which noise is drawn: its covariance over all of them is a matrix
FINE_STEPS = 1000  # largest number of steps that are shorter than the sampling interval
MOST_STEPS = 100_000  # largest number of steps of a forecast


class Forecast(Guided):
    """Means and standard deviations of future states and observations, (..., time, dim), batch leading."""

    CALLED = "forecast"
    LENGTH = "use len(forecast.times)"
    NODE = 'forecast.mean("{node}"), forecast.sd("{node}") or forecast.interval("{node}")'
    INSTEAD = instead(
        {
            "values means predictions states": 'forecast.mean("x")',
            "std sds stdev var": 'forecast.sd("x")',
            "ci conf_int lower upper quantile quantiles": 'forecast.interval("x", 0.95)',
            "time t horizon": "forecast.times",
            "samples sample draws": "session.sample(...)",
            "show figure": "forecast.plot()",
        }
    )

    def _node_names(self) -> Iterable[str]:
        return tuple(self._own("_means"))

    def __init__(self, times: Array, means: Mapping[str, Array], sds: Mapping[str, Array]) -> None:
        self.times = times
        """In the time of the run: the first is one step after the last observation."""
        self._means, self._sds = dict(means), dict(sds)

    def __repr__(self) -> str:
        times = f"{len(self.times)} times, t = {self.times[0]:.6g} to {self.times[-1]:.6g}"
        return "\n  ".join([f"Forecast of {times}", *(f"{name}: {mean.shape}" for name, mean in self._means.items())])

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

    def plot(
        self,
        after: Result | None = None,
        *,
        nodes: Sequence[str] | None = None,
        truth: Mapping[str, Any] | None = None,
        probability: float = 0.95,
        element: int = 0,
        dark: bool = False,
    ) -> Figure:
        """Means and intervals over time, a panel for each channel.

        Args:
            after: The result of the run so far, of which the last part is drawn before the forecast.
            nodes: Names of the nodes to draw; all unless given.
            truth: What came, (T, dim) at the times of the forecast, by node.
            probability: Probability of the intervals.
            element: Batch element.
            dark: Use the dark theme.
        """
        from pcnet.results.plots import forecast

        given = {name: (self.mean(name), self.interval(name, probability)) for name in nodes or self.nodes}
        return forecast(self.times, given, after, truth, probability, element, dark)

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


def forecast(
    session: Session,
    horizon: float,
    every: float | None = None,
    *,
    parameters: bool = True,
    inputs: Mapping[str, Any] | None = None,
) -> Forecast:
    """Means and standard deviations at every `every` until `horizon` from now; see `Session.forecast`."""
    every, count = _grid(session, horizon, every)
    program = session.program
    alone = forecasts_alone(program) is not None
    steps = _steps(session, every, count, 1 if alone else SUBSTEPS)
    ahead = inputs_ahead(session, inputs, count, steps, alone)
    make = partial(FutureOfOne if alone else FutureOfSystem, parameters=parameters)
    with torch.inference_mode(alone), torch.no_grad():
        future = make(program, session.state)
        moving = future.start(every / steps, count * steps)
        shown = _advance(session, make, future, moving, every / steps, steps, count, ahead=ahead)
    means, sds = ({n.removeprefix(k): v for n, v in shown.items() if n.startswith(k)} for k in ("mean/", "sd/"))
    if count * steps > 1 and _leaves_gaussians(session):
        with torch.inference_mode(), torch.no_grad():
            found = _ensemble(session, every, count, steps, 0, ahead).moments(parameters)
            means, sds = found.unless_confirmed(Moments(means, sds))
    for name, node in session.graph.nodes.items():
        if isinstance(node, ForecastsObservations) and name in means:
            with torch.inference_mode():
                mean, variance = node.forecast_observation(session.context(name), means[name], sds[name] ** 2)
            means[name], sds[name] = mean, variance.sqrt()
    times = session.time + every * np.arange(1, count + 1)
    _check_enough(session, {**means, **{f"{name} (sd)": sd for name, sd in sds.items()}}, times)
    shape = tuple(program.spec.batch_shape)
    return Forecast(times, _arrays(means, shape), _arrays(sds, shape))


def _leaves_gaussians(session: Session) -> bool:
    """Whether there is a single state that can draw its future, and whose belief does not stay Gaussian."""
    name = draws_alone(session.program, session.context)
    if name is None:
        return False
    node = session.program.nodes[name]
    assert isinstance(node, DrawsFutures)
    return not node.stays_gaussian(session.context(name))


def _ensemble(
    session: Session, every: float, count: int, steps: int, seed: int, ahead: Mapping[str, Tensor]
) -> Ensemble:
    program, state = session.program, session.state

    def advance(moving: Moving, noise: Tensor) -> dict[str, Tensor]:
        return _advance(session, PointsOfOne, future, moving, every / steps, steps, count, noise, ahead)

    future = PointsOfOne(program, state)
    return Ensemble(program, state, seed, advance, count * steps)


def _advance(
    session: Session,
    make: FutureMaker,
    future: Future,
    moving: Moving,
    step: float,
    steps: int,
    count: int,
    noise: Tensor | None = None,
    ahead: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """What is shown of a future after each `steps` steps of length `step`, `count` times; (T, B, dim) by name.

    Args:
        session: The session.
        make: Makes such a future of one batch element.
        future: The future of all of them.
        moving: Where it begins.
        step: Length of a step.
        steps: Number of steps from one time to the next.
        count: Number of times.
        noise: Given at each step, (steps · count, B, m).
        ahead: What else is given at each step by name, (steps · count, B, m), such as inputs; then nothing is compiled.
    """
    if not ahead and session.compiles(steps * count):
        from pcnet.engine.compiled.future import compiled_future

        found = compiled_future(session.program, session.state, make, moving, step, steps, count, noise)
        if found is not None:
            return found
    like = next(iter(moving.values()))
    given = {STEP: torch.full((len(like),), step, dtype=session.dtype, device=session.device)}
    shown: dict[str, list[Tensor]] = {}
    for k in range(count * steps):
        if noise is not None:
            given[NOISE] = noise[k]
        given |= {name: value[k] for name, value in ahead.items()}
        moving = future.step(moving, given)
        if (k + 1) % steps == 0:
            for name, value in future.show(moving, given).items():
                shown.setdefault(name, []).append(value)
    return {name: torch.stack(values) for name, values in shown.items()}


def draw(
    session: Session,
    horizon: float,
    draws: int,
    every: float | None,
    seed: int,
    inputs: Mapping[str, Any] | None = None,
) -> Draws:
    """Draws from the model that the graph is; see `Session.sample`."""
    every, count = _grid(session, horizon, every)
    if type(draws) is not int or draws < 1:
        raise SettingError(f"draws must be a whole number, 1 or more, not {draws!r}")
    if draws_alone(session.program, session.context) is not None:
        steps = _steps(session, every, count, 1)
        ahead = inputs_ahead(session, inputs, count, steps, True)
        with torch.inference_mode(), torch.no_grad():
            ensemble = _ensemble(session, every, count, steps, seed, ahead)
            values = ensemble.draws(draws)
        return _draws_of(session, values, every, count, draws, ensemble.generator)
    steps = _steps(session, every, count, SUBSTEPS)
    inputs_ahead(session, inputs, count, steps, False)
    if count * steps > MAX_STEPS:
        raise SettingError(f"{count * steps} steps are too many to draw noise for; use a shorter horizon")
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode(False), torch.no_grad():
        values = _simulate(session, draws, every, count, steps, generator)
    return _draws_of(session, values, every, count, draws, generator)


def _draws_of(
    session: Session, paths: Mapping[str, Tensor], every: float, count: int, draws: int, generator: torch.Generator
) -> Draws:
    values = dict(paths)
    for name, node in session.graph.nodes.items():
        if isinstance(node, ForecastsObservations) and name in values:
            with torch.inference_mode():
                values[name] = node.draw_observation(session.context(name), values[name], generator)
    times = session.time + every * np.arange(1, count + 1)
    _check_finite(session, values, times)
    return Draws(times, _arrays(values, (draws, *session.program.spec.batch_shape)))


def inputs_ahead(
    session: Session, inputs: Mapping[str, Any] | None, count: int, steps: int, alone: bool
) -> dict[str, Tensor]:
    """Inputs that are known ahead, at each of count · steps steps, (steps, B, m) by name; see `INPUT` and `OVER`.

    Args:
        session: The session.
        inputs: (..., count, m) by name, at the times of the forecast; NaN keeps the value before.
        count: Number of these times.
        steps: Steps from one to the next.
        alone: Whether there is a single Kalman state.
    """
    if not inputs:
        return {}
    if not alone:
        raise SettingError("inputs ahead are for graphs with one Kalman state; leave them out, and the last ones hold")
    found: dict[str, Tensor] = {}
    spec = session.program.spec
    for name, rows in session.read_inputs(inputs, count).items():
        linear = session.graph[name].is_interpolated
        value = session.context(name).state.observation[:, 0]
        ends, over = [], []
        for row in rows:
            given = row.expand(*spec.batch_shape, row.shape[-1]).reshape(spec.batch, -1)
            new = torch.where(torch.isnan(given), value, given)
            for j in range(steps):
                shares = (j / steps, (j + 1) / steps) if linear else (0.0, (j + 1) // steps)
                start, end = (value + (new - value) * share for share in shares)
                ends.append(end)
                over.append(0.5 * (start + end) if linear else start)
            value = new
        found |= {INPUT + name: torch.stack(ends), OVER + name: torch.stack(over)}
    return found


def innovation(session: Session, observation: Mapping[str, Tensor], t: float | None) -> dict[str, Innovation]:
    """Errors of one-step forecasts; NaN where an observation is missing."""
    wait = _interval(session) if t is None else t - session.time
    known = {
        name: value[..., None, :].cpu().numpy()
        for name, value in observation.items()
        if session.graph[name].is_input and bool(torch.isfinite(value).all())
    }
    alone = forecasts_alone(session.program) is not None
    expected = session.forecast(wait, wait, inputs=known if alone else None)
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


def _steps(session: Session, every: float, count: int, fine: int) -> int:
    """Number of integration steps from one time to the next: `fine` or more in a sampling interval, or one if that
    would be very many."""
    intervals = every / float(session.intervals.min())
    steps = max(1, round(intervals)) if fine == 1 else max(1, math.ceil(fine * intervals - 1e-9))
    if count * steps > FINE_STEPS:
        steps = max(1, round(intervals))
    if count * steps > MOST_STEPS:
        raise SettingError(
            f"that is {count * steps} integration steps, of about a sampling interval each; give a shorter horizon, at "
            f"most {MOST_STEPS} intervals ahead"
        )
    return steps


def _arrays(values: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Array]:
    """(T, B, dim) as (..., T, dim)."""
    return {name: v.movedim(0, 1).reshape(*shape, *v.shape[:1], *v.shape[2:]).numpy() for name, v in values.items()}


def _check_finite(session: Session, values: Mapping[str, Tensor], times: Array) -> None:
    """All draws of the batch elements that are in use must be finite."""
    needed = session.in_use
    for name, value in values.items():
        finite = torch.isfinite(value).all(-1)
        good = (finite if needed is None else finite.reshape(len(finite), -1, len(needed)) | ~needed).flatten(1).all(1)
        _raise_unless(good, name, times)


def _check_enough(session: Session, values: Mapping[str, Tensor], times: Array) -> None:
    """Moments must be finite; of a mixture, those of the rows that have most of the weight."""
    finite = torch.ones((), dtype=torch.bool)
    for name, value in values.items():
        finite = finite & torch.isfinite(value).all(-1)
        _raise_unless(session.has_enough(finite), name, times)


def _raise_unless(good: Tensor, name: str, times: Array) -> None:
    if not bool(good.all()):
        when = float(times[int((~good).nonzero()[0])])
        raise DivergenceError(f"the forecast of {name} is not finite from t = {when:g} on; use a shorter horizon")


def _simulate(
    session: Session, draws: int, every: float, count: int, steps: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """One path for each batch element and copy; (T, B, dim) of each state and sensor."""
    future = Path(session.program, session.state, copies=draws)
    system, step, total = future.system, every / steps, count * steps
    values, vectors = torch.linalg.eigh(system.covariance)  # singular where something is known exactly
    start = vectors * values.clamp_min(0).sqrt()[:, None, :]
    white = torch.randn(*system.mean.shape, 1, generator=generator, dtype=system.mean.dtype).to(system.mean.device)
    z = system.offset(system.mean + (start @ white)[..., 0])
    noise = z.new_zeros(total, z.shape[0], system.noises)
    for source in system.sources:
        weights = cells(source.kernel, step, total, source.hold) / step**2
        noise[..., source.place] = _coloured(weights, total, source.covariance, generator)
    shown = _advance(session, Path, future, {"/z": z}, step, steps, count, noise)
    paths = {name: shown[f"mean/{name}"] for name in [*system.states, *system.sensors]}
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

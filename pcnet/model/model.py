"""Models: a graph together with the schedule that runs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import torch

from pcnet.errors import ScheduleError, SettingError, UsageError
from pcnet.guidance import Guided, instead, unknown_argument
from pcnet.model.graph import Graph
from pcnet.model.hypotheses import Hypotheses
from pcnet.model.links import Parametrises, Predicts, Weighs
from pcnet.model.schedule import LevelNodes, Schedule, adaptive_filtering, batch, odem

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from pcnet.engine.fit import Fit
    from pcnet.engine.session import Session
    from pcnet.numerics.estimators import ParameterEstimator
    from pcnet.results.recorder import Record
    from pcnet.results.result import Result

OnDivergence = Literal["raise", "stop", "hold", "reset"]
"""What to do with batch elements that diverge: raise an error; stop them; hold them for that observation, as if it were
missing; or reset them, to start anew with the next one."""


Engine = Literal["auto", "compiled", "eager"]
"""What runs a model: compiled code, torch operation by operation, or compiled code where that is possible."""


class RunOptions(TypedDict, total=False):
    """Options of every kind of run; see `Model.run`."""

    record: Record | Iterable[str] | None
    dtype: torch.dtype
    device: torch.device | str
    threads: int | None
    on_divergence: OnDivergence
    engine: Engine
    smooth: bool | int
    screen: bool


OPTIONS = (*RunOptions.__annotations__, "warm_start", "copies")  # the last two are for fits
INSTEAD_OF_OPTIONS = instead(
    {
        "t time timestamps ts index": "times=, a number for each observation, of model.run or session.run",
        "dt delta_t sampling_rate fs": "dt of the model: adaptive_filter(flow, dim, dt), SensoryNode(..., dt=dt)",
        "u inputs control exog": 'observations with inputs by name: model.run({"y": y, "u": u})',
        "callback verbose": "progress=True, of model.run or session.run",
        "save output": "model.run(...).save('run.nc')",
        "seed rng key": "no seed: a run is not random",
        "y data observations z": "model.run(observations); a session takes them later, by session.run or session.step",
    }
)


class Model(Guided):
    """A graph and its schedule: everything that can be done with a model starts here.

    It unpacks as (graph, schedule) if it has no hypotheses.

    Args:
        graph: The graph.
        schedule: The schedule; unless given, the one that fits the nodes (see `fitting_schedule`).
        hypotheses: Hypotheses under which the graph is run side by side, for graphs of Kalman states.
    """

    __slots__ = ("compiled", "graph", "hypotheses", "schedule")
    CALLED = "model"
    NODE = 'model.graph["{node}"] for the node, model.run(observations).mean("{node}") for its belief'
    INSTEAD = instead(
        {
            "filter infer inference estimate track forward transform": "model.run(observations)",
            "train learn optimise optimize": "model.run(observations), or model.fit for recorded data",
            "predict forecast": "a session: s = model.start(); s.run(y); s.forecast(horizon)",
            "update step observe": "a session: s = model.start(); s.step(y)",
            "smooth smoother": 'model.run(observations, smooth=True), then result.smoothed("x")',
            "sample simulate generate": "pcnet.simulate.simulate(flow, ...), or session.sample(...)",
            "session stream begin open": "model.start()",
            "resume": 'pcnet.resume("run.ckpt", model)',
            "plot show visualise visualize": "model.draw(), or model.run(observations).plot()",
            "summary mean sd result": "model.run(observations).{name}",
            "nodes links": "model.graph.{name}",
            "parameters params state_dict": 'model.run(observations).mean("theta")',
            "compile eval to cuda double": "model.run(observations, engine=..., dtype=..., device=...)",
            "sweep compare": "pcnet.sweep(build, settings, observations)",
        }
    )

    def __init__(self, graph: Graph, schedule: Schedule | None = None, hypotheses: Hypotheses | None = None) -> None:
        if not isinstance(graph, Graph):
            raise SettingError(f"Model: give a Graph, not {graph!r}")
        if schedule is not None and not isinstance(schedule, Schedule):
            raise ScheduleError(f"schedule must be a Schedule, such as pcnet.odem(), not {schedule!r}")
        if hypotheses is not None:
            _check_hypotheses(graph, hypotheses)
        self.graph, self.hypotheses = graph, hypotheses
        self.schedule = fitting_schedule(graph) if schedule is None else schedule
        self.compiled: dict[object, Any] = {}
        """Compiled ticks, which sessions of this model share; see `pcnet.engine.compiled`."""

    def _node_names(self) -> Iterable[str]:
        return tuple(self._own("graph").nodes)

    def __iter__(self) -> Iterator[Any]:
        if self.hypotheses is not None:
            raise SettingError(
                "a model with hypotheses is more than a graph and a schedule; use model.graph and model.schedule, or "
                "make it without: adaptive_filter(..., hypotheses=None)"
            )
        return iter((self.graph, self.schedule))

    def __repr__(self) -> str:
        return f"{self.graph}\n{self.schedule}"

    if not TYPE_CHECKING:

        def __call__(self, *_: Any, **__: Any) -> Any:
            raise UsageError("a model is not called; use model.run(observations), or model.start() for a stream")

    def run(
        self,
        observations: Any,
        *,
        progress: bool | None = None,
        times: Iterable[float] | None = None,
        **options: Unpack[RunOptions],
    ) -> Result:
        """Run over all observations.

        Args:
            observations: (..., T, dim), (T,) for one channel, or any iterable of single observations (..., dim). With
                several sensory nodes, a mapping from their names to these. NaN is a missing channel, None (or a missing
                name) a missing node.
            progress: Whether to show a progress bar on standard error; by default if that is a terminal.
            times: Time of each observation, if they are not regular.
            record: What to keep: a `Record`, or names of quantities.
            dtype: torch.float64 (default) or torch.float32.
            device: A device of torch; "cpu" unless given.
            threads: Threads that torch may use within an operation; 1 (default) is best for small graphs, None leaves
                torch's own setting.
            on_divergence: "raise" (default) ends the run with a `DivergenceError`. "stop" ends the batch elements that
                diverge; `result.diverged` names them, and their traces are NaN from there on. "hold" treats the
                observation as missing for them, "reset" restarts them with the next one; `result.fallbacks` counts
                how often.
            screen: Whether the policies "stop", "hold" and "reset" also take implausible values as missing, before they
                do harm: those much further from the last one than any value was lately, and far from the forecast.
                True by default.
            engine: "auto" (default) runs compiled code where it can and pays, "compiled" refuses with the reason where
                it cannot, "eager" runs torch operation by operation. `result.engine` says which one acted.
            smooth: True keeps what a smoother needs: `result.smoothed("x")` is the belief about each state given all
                observations. For `start`, a number keeps it of so many observations, for `session.smoothed(lag)`. For
                graphs with one Kalman state.

        Returns:
            What was recorded.
        """
        session = self.start(**options)
        session.run(observations, progress=progress, times=times)
        return session.final_result()

    def start(self, **options: Unpack[RunOptions]) -> Session:
        """A session that takes one observation at a time, `session.step(y)`. The options are those of `run`."""
        for name in options:
            if name not in OPTIONS:
                raise unknown_argument("model.run(), as model.start(),", name, OPTIONS, INSTEAD_OF_OPTIONS)
        if self.schedule.on_end:
            raise ScheduleError(f"{self.schedule.name} is for recorded data: use model.fit(observations)")
        if self.hypotheses is not None:
            from pcnet.engine.mixture import MixtureSession

            return MixtureSession(self, **options)
        if options.get("smooth", False) is not False:
            from pcnet.engine.smooth import SmoothingSession

            return SmoothingSession(self, **options)
        from pcnet.engine.session import Session

        return Session(self, **options)

    def fit(
        self,
        observations: Any,
        *,
        max_iterations: int = 50,
        tolerance: float = 1e-4,
        estimator: ParameterEstimator | None = None,
        slopes: Literal["exact", "messages"] = "exact",
        progress: bool | None = None,
        times: Iterable[float] | None = None,
        **options: Unpack[RunOptions],
    ) -> Fit:
        """Fit parameters and precisions to recorded observations by repeated passes; see `pcnet.engine.fit`.

        A model whose schedule is online is fitted with the schedule `batch()`.

        Args:
            observations: As for `run`, but not an iterator.
            max_iterations: Largest number of passes; a last one with what was found follows.
            tolerance: The fit has converged once the free action changes by less than this from one pass to the next.
            estimator: Estimator of whatever is updated after a pass, instead of its own.
            slopes: "exact" runs 2n + 1 copies side by side, for n fitted numbers, and minimises the free action;
                "messages" runs one, for large n, and finds where the messages agree, which may differ from the minimum.
            progress: As for `run`; so are times and the options. record is for the last pass, on_divergence is "raise"
                or "stop", and nothing is screened.
            times: Time of each observation.
        """
        from pcnet.engine.fit import fit

        schedule = self.schedule if self.schedule.on_end else batch()
        return fit(
            Model(self.graph, schedule),
            observations,
            max_iterations=max_iterations,
            tolerance=tolerance,
            estimator=estimator,
            slopes=slopes,
            progress=progress,
            times=times,
            **options,
        )

    def draw(self, *, ax: Axes | None = None, dark: bool = False) -> Axes:
        """A drawing of the graph in levels from sensory nodes up, with the clocks of the schedule."""
        return self.graph.draw(self.schedule, ax=ax, dark=dark)

    def save(self, path: str | Path) -> Path:
        """Write the model to a YAML or JSON file, atomically; functions are written by name (`pcnet.register`)."""
        from pcnet.io.model_files import save_model

        return save_model(path, self)

    @classmethod
    def load(cls, path: str | Path) -> Model:
        """Read a model from a YAML or JSON file."""
        from pcnet.io.model_files import load_model

        return load_model(path)


def _check_hypotheses(graph: Graph, hypotheses: Hypotheses) -> None:
    """Raise `SettingError` unless the hypotheses are such, and the evidence of the graph can weigh them."""
    if not isinstance(hypotheses, Hypotheses):
        raise SettingError(f"hypotheses must be pcnet.Hypotheses(...) or None, not {hypotheses!r}")
    for node in graph.nodes.values():
        if node.role == "state" and not node.sends_covariance:
            raise SettingError(
                f"hypotheses are weighed by how well they predict, which needs Kalman states; {node.title} is none"
            )
    for name in (*hypotheses.guess, *hypotheses.told):
        if name not in graph.nodes or graph[name].role != "precision":
            what = "guessed" if name in hypotheses.guess else "told"
            raise SettingError(f"hypotheses: there is no precision node {name!r} whose level could be {what}")


def device_of(name: torch.device | str) -> torch.device:
    """A device of torch by its name."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError, ValueError):
        raise SettingError(f"there is no device {name!r}; use 'cpu', 'cuda' or another of torch's") from None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as why:
        raise SettingError(f"{name!r} cannot be used: {str(why).splitlines()[0]}; use 'cpu'") from None
    return device


def fitting_schedule(graph: Graph) -> Schedule:
    """The schedule that fits the nodes of a graph: `odem()`, or `adaptive_filtering` for Kalman states.

    Raises:
        ScheduleError: If the graph has Kalman states beside others, so that it needs a schedule of its own.
    """
    states = {name: node for name, node in graph.nodes.items() if node.role == "state"}
    carried = {name for name, node in states.items() if "predict" in node.required_actions}
    if not carried:
        return odem()
    if carried != set(states):
        others = ", ".join(sorted(set(states) - carried))
        raise ScheduleError(
            f"the states {', '.join(sorted(carried))} carry their beliefs and {others} do not, so that no shipped "
            "schedule fits both; give schedule=pcnet.Schedule(acts=(...)), see the documentation on schedules"
        )
    levels: list[LevelNodes] = []
    below = [name for name, node in graph.nodes.items() if node.observes]
    while below:
        above = [link for name in below for link in graph.above(graph[name]) if isinstance(link, Predicts)]
        names = tuple(dict.fromkeys(link.parent.name for link in above))
        if not names:
            break
        precisions = _parents(graph, [*names, *(below if not levels else [])], Weighs)
        levels.append(LevelNodes(names, precisions, _parents(graph, names, Parametrises)))
        below = list(levels[-1].parameters)
    if any(not (level.precisions or level.parameters) for level in levels[:-1]):
        raise ScheduleError("a level of the stack has no parameters or precisions; give a schedule")
    return adaptive_filtering(levels=levels)


def _parents(graph: Graph, names: Iterable[str], kind: type[Weighs | Parametrises]) -> tuple[str, ...]:
    """Names of the nodes that are linked to these from above by one kind of link, and that can learn there."""
    found = []
    for name in names:
        above = graph.above(graph[name])
        links = [link for link in above if isinstance(link, kind)]
        found += [link.parent.name for link in links if graph[name].default_estimator(link, above) is not None]
    return tuple(dict.fromkeys(found))

"""Models: a graph together with the schedule that runs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from pcnet.errors import ScheduleError, SettingError
from pcnet.model.graph import Graph
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


class Model:
    """A graph and its schedule: everything that can be done with a model starts here. It unpacks as (graph, schedule).

    Args:
        graph: The graph.
        schedule: The schedule; unless given, the one that fits the nodes (see `fitting_schedule`).
    """

    __slots__ = ("graph", "schedule")

    def __init__(self, graph: Graph, schedule: Schedule | None = None) -> None:
        if not isinstance(graph, Graph):
            raise SettingError(f"Model: give a Graph, not {graph!r}")
        if schedule is not None and not isinstance(schedule, Schedule):
            raise ScheduleError(f"schedule must be a Schedule, such as pcnet.odem(), not {schedule!r}")
        self.graph = graph
        self.schedule = fitting_schedule(graph) if schedule is None else schedule

    def __iter__(self) -> Iterator[Any]:
        return iter((self.graph, self.schedule))

    def __repr__(self) -> str:
        return f"{self.graph}\n{self.schedule}"

    # --- running -------------------------------------------------------------------------------------------------
    def run(
        self,
        observations: Any,
        *,
        record: Record | Iterable[str] | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        threads: int | None = 1,
        on_divergence: OnDivergence = "raise",
        progress: bool | None = None,
        times: Iterable[float] | None = None,
    ) -> Result:
        """Run over all observations.

        Args:
            observations: (..., T, dim), (T,) for one channel, or any iterable of single observations (..., dim). With
                several sensory nodes, a mapping from their names to these. NaN is a missing channel, None (or a missing
                name) a missing node.
            record: What to keep: a `Record`, or names of quantities.
            dtype: torch.float64 or torch.float32.
            device: A device of torch.
            threads: Threads that torch may use within an operation; 1 is best for small graphs, None leaves torch's
                own setting.
            on_divergence: "raise" ends the run with a `DivergenceError`. "stop" ends the batch elements that diverge;
                `result.diverged` names them, and their traces are NaN from there on. "hold" treats the observation as
                missing for them, "reset" restarts them with the next one; `result.fallbacks` counts how often.
            progress: Whether to show a progress bar on standard error; by default if that is a terminal.
            times: Time of each observation, if they are not regular.

        Returns:
            What was recorded.
        """
        session = self.start(record=record, dtype=dtype, device=device, threads=threads, on_divergence=on_divergence)
        session.run(observations, progress=progress, times=times)
        return session.result()

    def start(
        self,
        *,
        record: Record | Iterable[str] | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        threads: int | None = 1,
        on_divergence: OnDivergence = "raise",
    ) -> Session:
        """A session that takes one observation at a time, `session.step(y)`. The options are those of `run`."""
        from pcnet.engine.session import Session

        if self.schedule.on_end:
            raise ScheduleError(
                f"{self.schedule.name} is a schedule for recorded data: use model.fit(observations), or a schedule "
                "without on_end"
            )
        return Session(
            self,
            record=record,
            dtype=dtype,
            device=device_of(device),
            threads=threads,
            on_divergence=on_divergence,
        )

    def fit(
        self,
        observations: Any,
        *,
        max_iterations: int = 50,
        tolerance: float = 1e-4,
        estimator: ParameterEstimator | None = None,
        slopes: Literal["exact", "messages"] = "exact",
        record: Record | Iterable[str] | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        threads: int | None = 1,
        on_divergence: Literal["raise", "stop"] = "raise",
        progress: bool | None = None,
        times: Iterable[float] | None = None,
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
            record: What to keep of the last pass.
            dtype: As for `run`; so are the options below.
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
            record=record,
            dtype=dtype,
            device=device_of(device),
            threads=threads,
            on_divergence=on_divergence,
            progress=progress,
            times=times,
        )

    # --- drawing and files -----------------------------------------------------------------------------------------
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


def device_of(name: torch.device | str) -> torch.device:
    """A device of torch by its name."""
    try:
        return torch.device(name)
    except (RuntimeError, TypeError):
        raise SettingError(f"there is no device {name!r}; use 'cpu', 'cuda' or another of torch's") from None


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
        weighed = [*names, *(below if not levels else [])]
        precisions = _parents(graph, weighed, Weighs)
        parameters = _parents(graph, names, Parametrises)
        levels.append(LevelNodes(names, precisions, parameters))
        below = list(parameters)
    if any(not (level.precisions or level.parameters) for level in levels[:-1]):
        raise ScheduleError("a level of the stack has no parameters or precisions; give a schedule")
    return adaptive_filtering(levels=levels, warmup="doubling" if len(levels) == 1 else "none")


def _parents(graph: Graph, names: Iterable[str], kind: type[Weighs | Parametrises]) -> tuple[str, ...]:
    """Names of the nodes that are linked to these from above by one kind of link, and that can learn there."""
    found = []
    for name in names:
        above = graph.above(graph[name])
        links = [link for link in above if isinstance(link, kind)]
        found += [link.parent.name for link in links if graph[name].default_estimator(link, above) is not None]
    return tuple(dict.fromkeys(found))

"""What a run leaves behind: named, labelled arrays, and ways to keep, look at and share them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pcnet.errors import ResultError
from pcnet.files import atomic_write
from pcnet.results.graph_summary import GraphSummary

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from matplotlib.figure import Figure

    from pcnet.results.error_flow import ErrorFlow

Array = NDArray[Any]
FORMAT = 2
"""The version of the file format that `save` writes; 1 had no structure of the graph."""


class Trace(NamedTuple):
    """A recorded quantity (..., time, *dims), its batch dimensions leading."""

    values: Array
    dims: tuple[str, ...]


class Interval(NamedTuple):
    """A credible interval, bound by bound."""

    lower: Array
    upper: Array


class Divergence(NamedTuple):
    """The number of the observation at which a run stopped, −1 where it did not, and the name of the node; (...)."""

    at: Array
    node: Array


class Result:
    """Recorded beliefs, predictions and free energies of a run. Arrays are (..., time, *own), batch leading."""

    def __init__(
        self,
        *,
        traces: Mapping[str, Trace],
        batch_shape: tuple[int, ...],
        times: Array,
        free_action: Array,
        fallbacks: Mapping[str, Array],
        diverged: Divergence | None = None,
        observations: int,
        roles: Mapping[str, str],
        summary: str,
        schedule: str,
        structure: GraphSummary | None = None,
    ) -> None:
        self.traces = dict(traces)
        self.batch_shape = tuple(batch_shape)
        self.times = times
        """The time of each recorded observation; the first is at 0."""
        self.free_action = free_action
        """The sum of the free energy over all observations, recorded or not; (...)."""
        self.fallbacks = dict(fallbacks)
        """How often a named fallback acted, by node; (...)."""
        self.diverged = diverged or Divergence(np.full(batch_shape, -1), np.full(batch_shape, ""))
        """Where and when batch elements diverged, if the run was to stop those only; (...)."""
        self.observations = observations
        """How many observations were taken in."""
        self.roles = dict(roles)
        """The role of each node by name."""
        self.summary = summary
        self.schedule = schedule
        self.structure = structure
        """Nodes, links, levels and clocks of the graph; None in results of files that have none."""

    # --- arrays ------------------------------------------------------------------------------------------------
    def get(self, node: str, quantity: str) -> Array:
        """Any recorded quantity of a node, for example get("y", "prediction")."""
        key = f"{node}.{quantity}"
        if key not in self.traces:
            if node not in self.roles:
                raise ResultError(f"there is no node {node!r}; nodes: {', '.join(self.roles)}")
            if not len(self.times):
                raise ResultError("nothing was recorded: record.every is more than the number of observations")
            held = sorted(k.removeprefix(f"{node}.") for k in self.traces if k.startswith(f"{node}."))
            raise ResultError(
                f"{quantity!r} of {node!r} was not recorded; recorded of it: {', '.join(held) or 'nothing'}. "
                f"Ask for it by record=[..., {quantity!r}], if it is a quantity of such a node"
            )
        return self.traces[key].values

    def mean(self, node: str) -> Array:
        return self.get(node, "mean")

    def sd(self, node: str) -> Array:
        return self.get(node, "sd")

    def covariance(self, node: str) -> Array:
        return self.get(node, "covariance")

    def prediction(self, node: str) -> Array:
        return self.get(node, "prediction")

    def observation(self, node: str) -> Array:
        return self.get(node, "observation")

    def message(self, sender: str, receiver: str, of: str | None = None) -> Array:
        """What passed along a link at each time, flattened; recorded by Record(messages=True).

        of: for parameters of a mapping, the node that is predicted by it.
        """
        for what in ("prediction", "error"):
            trace = self.traces.get(f"{sender} to {receiver}{f' ({of})' if of else ''}.{what}")
            if trace is not None:
                return trace.values
        raise ResultError(
            f"no message from {sender!r} to {receiver!r} was recorded; use record=Record(messages=True) and "
            "the names of neighbours"
        )

    def interval(self, node: str, probability: float = 0.95) -> Interval:
        """The central credible interval of a node's belief."""
        if not 0 < probability < 1:
            raise ResultError(f"a probability must be between 0 and 1, not {probability}")
        reach = NormalDist().inv_cdf(0.5 + probability / 2)
        mean, sd = self.mean(node), self.sd(node)
        return Interval(mean - reach * sd, mean + reach * sd)

    @property
    def accuracy(self) -> Array:
        return self._energy("accuracy")

    @property
    def complexity(self) -> Array:
        return self._energy("complexity")

    @property
    def free_energy(self) -> Array:
        """F = complexity − accuracy at each recorded observation; (..., time)."""
        difference: Array = self.complexity - self.accuracy
        return difference

    def free_energy_of(self, node: str) -> Array:
        """A node's share of the free energy; the shares of all nodes add up to `free_energy`."""
        return self.get(node, "free_energy")

    def _energy(self, name: str) -> Array:
        if name not in self.traces:
            raise ResultError(f"{name} was not recorded; ask for it by record=[..., 'energy']")
        return self.traces[name].values

    def element(self, index: int) -> Result:
        """One batch element, along the first batch dimension."""
        if not self.batch_shape:
            raise ResultError("this result has no batch dimensions")
        if not -self.batch_shape[0] <= index < self.batch_shape[0]:
            raise ResultError(f"there is no batch element {index}; there are {self.batch_shape[0]}")
        return Result(
            traces={key: Trace(trace.values[index], trace.dims) for key, trace in self.traces.items()},
            batch_shape=self.batch_shape[1:],
            times=self.times,
            free_action=self.free_action[index],
            fallbacks={name: count[index] for name, count in self.fallbacks.items()},
            diverged=Divergence(np.asarray(self.diverged.at[index]), np.asarray(self.diverged.node[index])),
            observations=self.observations,
            roles=self.roles,
            summary=self.summary,
            schedule=self.schedule,
            structure=self.structure,
        )

    def single(self, element: int | tuple[int, ...] = 0) -> Result:
        """One batch element by its index, or by its number counting all of them; this result if it has no batch."""
        result = self
        for index in np.unravel_index(self.flat_index(element), self.batch_shape) if self.batch_shape else ():
            result = result.element(int(index))
        return result

    def flat_index(self, element: int | tuple[int, ...]) -> int:
        """The number of a batch element, counting all of them."""
        shape = self.batch_shape
        try:
            if isinstance(element, tuple):
                return int(np.ravel_multi_index(element, shape))
            return range(int(np.prod(shape, dtype=int)))[element]
        except (IndexError, ValueError, TypeError):
            batch = f"the batch has shape {shape}" if shape else "there is no batch, so use element=0"
            raise ResultError(f"there is no batch element {element!r}: {batch}") from None

    def __repr__(self) -> str:
        batch = f", batch {self.batch_shape}" if self.batch_shape else ""
        lines = [f"Result of {self.observations} observations{batch}, {len(self.times)} recorded"]
        for key, trace in self.traces.items():
            lines.append(f"  {key}: {trace.values.shape}")
        return "\n".join(lines)

    # --- tables ------------------------------------------------------------------------------------------------
    def to_xarray(self) -> xr.Dataset:
        """A dataset with a variable for each trace ("x.mean") and labelled dimensions."""
        import xarray as xr

        batch = self._batch_dims()
        variables: dict[str, Any] = {}
        for key, trace in self.traces.items():
            node = key.rpartition(".")[0]
            own = tuple(f"{node}.{dim}" for dim in trace.dims)
            variables[key] = ((*batch, "time", *own), trace.values)
        variables["free_action"] = (batch, self.free_action)
        for node, count in self.fallbacks.items():
            variables[f"{node}.fallbacks"] = (batch, count)
        variables["diverged.at"] = (batch, self.diverged.at)
        variables["diverged.node"] = (batch, self.diverged.node)
        about = {
            "format": FORMAT,
            "pcnet_version": package_version(),
            "observations": self.observations,
            "roles": json.dumps(self.roles),
            "dims": json.dumps({key: trace.dims for key, trace in self.traces.items()}),
            "graph": self.summary,
            "schedule": self.schedule,
        }
        if self.structure is not None:
            about["structure"] = self.structure.to_json()
        return xr.Dataset(variables, coords={"time": self.times}, attrs=about)

    def to_dataframe(self) -> pd.DataFrame:
        """A long table with a row for each number: time, node, quantity, order, dimension, batch…, value."""
        import pandas as pd

        parts = []
        for key, trace in self.traces.items():
            node, _, quantity = key.rpartition(".")
            names = [*self._batch_dims(), "time", *trace.dims]
            index = np.indices(trace.values.shape).reshape(len(names), -1)
            columns = {name: index[i] for i, name in enumerate(names)}
            columns["time"] = self.times[columns["time"]]
            columns["value"] = trace.values.reshape(-1)
            parts.append(pd.DataFrame(columns).assign(node=node, quantity=quantity))
        if not parts:
            return pd.DataFrame(columns=["time", "node", "quantity", "value"])
        table = pd.concat(parts, ignore_index=True)
        first = ["time", "node", "quantity"]
        middle = [c for c in table.columns if c not in (*first, "value")]
        table[middle] = table[middle].astype("Int64")
        return table[[*first, *middle, "value"]]

    def _batch_dims(self) -> tuple[str, ...]:
        if len(self.batch_shape) == 1:
            return ("batch",)
        return tuple(f"batch_{i}" for i in range(len(self.batch_shape)))

    # --- files -------------------------------------------------------------------------------------------------
    def save(self, path: str | Path) -> Path:
        """Write a NetCDF file, whole or not at all."""
        path = Path(path)
        if not path.parent.is_dir():
            raise ResultError(f"there is no folder {str(path.parent)!r} to save into")
        with atomic_write(path) as scratch:
            self.to_xarray().to_netcdf(scratch, engine="h5netcdf")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Result:
        """Read a file that `save` wrote."""
        import xarray as xr

        path = Path(path)
        if not path.exists():
            raise ResultError(f"there is no file {str(path)!r}")
        try:
            with xr.open_dataset(path, engine="h5netcdf") as opened:
                data = opened.load()
        except Exception as error:
            raise ResultError(f"{str(path)!r} is not a NetCDF file, or it is damaged: {error}") from None
        missing = {"format", "roles", "dims", "graph", "schedule", "observations"} - set(data.attrs)
        if missing:
            raise ResultError(f"{str(path)!r} was not written by pcnet: it lacks {', '.join(sorted(missing))}")
        if int(data.attrs["format"]) > FORMAT:
            raise ResultError(f"{str(path)!r} has format {data.attrs['format']}; this pcnet reads up to {FORMAT}")
        dims = {key: tuple(names) for key, names in json.loads(data.attrs["dims"]).items()}
        ending = ".fallbacks"
        return cls(
            traces={key: Trace(data[key].values, names) for key, names in dims.items()},
            batch_shape=data["free_action"].shape,
            times=data["time"].values,
            free_action=data["free_action"].values,
            diverged=Divergence(data["diverged.at"].values, data["diverged.node"].values.astype(str)),
            fallbacks={str(k).removesuffix(ending): data[k].values for k in data if str(k).endswith(ending)},
            observations=int(data.attrs["observations"]),
            roles=json.loads(data.attrs["roles"]),
            summary=data.attrs["graph"],
            schedule=data.attrs["schedule"],
            structure=GraphSummary.from_json(data.attrs["structure"]) if "structure" in data.attrs else None,
        )

    # --- pictures ----------------------------------------------------------------------------------------------
    def plot(self, **options: Any) -> Figure:
        """States, sensations, parameters, precisions and free energy on one page; see `pcnet.plotting.overview`."""
        from pcnet.results.plots import overview

        return overview(self, **options)

    def error_flow(self, element: int | tuple[int, ...] = 0) -> ErrorFlow:
        """Which node was surprised, when, and what it told whom; of a run with record=Record.flow()."""
        from pcnet.results.error_flow import ErrorFlow

        return ErrorFlow(self, element)


def package_version() -> str:
    try:
        return version("pcnet")
    except PackageNotFoundError:
        return "unknown"

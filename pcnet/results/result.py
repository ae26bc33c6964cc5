"""Result of a run: recorded quantities as labelled arrays, and how to save, load, tabulate and plot them."""

from __future__ import annotations

import dataclasses
import difflib
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pcnet.errors import ResultError
from pcnet.files import atomic_write, check_target, path_of, plain_os_errors, read_regular, seal, unseal
from pcnet.guidance import Guided, arguments, instead
from pcnet.results.downsample import Array
from pcnet.results.graph_summary import GraphSummary

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from matplotlib.figure import Figure

    from pcnet.results.error_flow import ErrorFlow
    from pcnet.results.summary import Summary

FORMAT = 3  # version of the file format that `save` writes; 1 has no graph summary, 1 and 2 have no digest
TIDY: dict[tuple[str, ...], tuple[str, ...]] = {
    (): (),
    ("dimension",): ("dimension",),
    ("category",): ("dimension",),
    ("order", "dimension"): ("order", "dimension"),
    ("error_order", "dimension"): ("order", "dimension"),
}
"""Dimensions of the quantities that a tidy table has, and the columns that number them."""
NOTHING_RECORDED = "nothing was recorded: record.every is more than the number of observations; use a smaller `every`"


class Trace(NamedTuple):
    """Recorded values of one quantity."""

    values: Array  # (..., time, *dims), batch dimensions first
    dims: tuple[str, ...]


class Interval(NamedTuple):
    """Bounds of a credible interval."""

    lower: Array
    upper: Array

    @classmethod
    def normal(cls, mean: Array, sd: Array, probability: float) -> Interval:
        """The central interval of a normal distribution."""
        if isinstance(probability, bool) or not isinstance(probability, (int, float)) or not 0 < probability < 1:
            raise ResultError(f"a probability must be between 0 and 1, not {probability!r}; 95 % is 0.95")
        margin = NormalDist().inv_cdf(0.5 + probability / 2) * sd
        return cls(mean - margin, mean + margin)


class Smoothed(NamedTuple):
    """A belief about the variables of a node, given later observations as well; batch dimensions first."""

    mean: Array  # (..., n), or (..., time, n) of a whole run
    sd: Array
    covariance: Array  # (..., n, n)

    def interval(self, probability: float = 0.95) -> Interval:
        """The central credible interval, mean ± z·sd."""
        return Interval.normal(self.mean, self.sd, probability)


OTHER_FORMATS = (".csv", ".json", ".xlsx", ".parquet", ".npy", ".npz", ".mat", ".pkl", ".png", ".html")
"""Endings of files that no result is written to, because other programs would take it for something else."""


class Prior(NamedTuple):
    """Mean and standard deviation of a belief before the first observation; (..., n) each, batch dimensions first."""

    mean: Array
    sd: Array


class Divergence(NamedTuple):
    """Index of the observation at which each batch element diverged (−1: it did not), and the node; (...)."""

    at: Array
    node: Array


@dataclasses.dataclass(kw_only=True, repr=False, eq=False)
class Result(Guided):
    """Recorded beliefs, predictions and free energies of a run. Arrays are (..., time, *dims), batch first."""

    CALLED = "result"
    LENGTH = "use result.observations for their number, or len(result.times) for that of recorded ones"
    NODE = 'result.mean("{node}"), result.sd("{node}") or result.interval("{node}")'
    INSTEAD = instead(
        {
            "states state means estimates values": 'result.mean("x"), an array over time',
            "parameters params parameter": 'result.mean("theta")[-1], or result.summary()',
            "std stds stdev sds error stderr": 'result.sd("x")',
            "cov var variance covariances": 'result.covariance("x"), or result.sd("x") ** 2',
            "ci conf_int confidence_interval hdi intervals": 'result.interval("x", 0.95)',
            "predictions predicted fitted fittedvalues": 'result.prediction("y")',
            "predict forecast sample step": "a session: s = model.start(); s.run(y); s.forecast(5.0)",
            "smooth smoother": 'model.run(observations, smooth=True), then result.smoothed("x")',
            "loglik log_likelihood llf logp evidence elbo bic aic": "-result.free_action",
            "df dataframe to_df to_pandas table": "result.to_dataframe()",
            "to_csv to_excel to_parquet csv": 'result.to_dataframe().to_csv("run.csv")',
            "to_netcdf write dump to_pickle": 'result.save("run.nc")',
            "show figure draw plots": "result.plot()",
            "describe print_summary info report head tail": "print(result.summary())",
            "time t index": "result.times",
            "surprise messages flow": "result.error_flow(), of a run with record=pcnet.Record.flow()",
            "keys items nodes names": "result.roles, the kinds of its nodes by name",
        }
    )
    ARGUMENTS = arguments(
        mean={"()": 'result.mean("x"), an array over time', "axis": 'numpy: result.mean("x").mean(axis)'},
        sd={"()": 'result.sd("x"), an array over time'},
        interval={
            "()": 'result.interval("x", 0.95)',
            "alpha level confidence q prob": "probability=, such as 0.95",
        },
    )

    def _node_names(self) -> Iterable[str]:
        return tuple(self._own("roles"))

    traces: dict[str, Trace]  # recorded quantities by name, such as "x.mean"
    batch_shape: tuple[int, ...]
    times: Array  # time of each recorded observation; the first observation is at 0
    free_action: Array  # sum of the free energy over all observations, recorded or not; (...)
    fallbacks: dict[str, Array]  # how often each node used its fallback; (...)
    observations: int  # number of observations of the run
    roles: dict[str, str]  # role of each node
    graph: str  # the graph as text
    schedule: str  # the schedule as text
    structure: GraphSummary | None = None  # nodes, links, levels and clocks; None for files of format 1
    engine: str = "eager"  # the engine that acted, "compiled" or "eager"
    priors: dict[str, Prior] = dataclasses.field(default_factory=dict)  # of parameters and noise levels, by node
    eager_ticks: int = 0  # ticks that were eager, because the compiled engine left them or did not act
    diverged: Divergence = None  # type: ignore[assignment]  # where batch elements stopped, with on_divergence="stop"

    def __post_init__(self) -> None:
        if self.diverged is None:
            self.diverged = Divergence(np.full(self.batch_shape, -1), np.full(self.batch_shape, ""))

    # --- arrays ------------------------------------------------------------------------------------------------
    def get(self, node: str, quantity: str) -> Array:
        """Recorded quantity of a node, for example get("y", "prediction")."""
        if not isinstance(node, str) or not isinstance(quantity, str):
            raise ResultError(f"give the name of a node and of a quantity as text, not {node!r} and {quantity!r}")
        key = f"{node}.{quantity}"
        if key not in self.traces:
            if node not in self.roles:
                raise ResultError(f"there is no node {node!r}; {self._instead_of(node)}")
            if not len(self.times):
                raise ResultError(NOTHING_RECORDED)
            known = sorted(k.removeprefix(f"{node}.") for k in self.traces if k.startswith(f"{node}."))
            raise ResultError(
                f"{quantity!r} of {node!r} was not recorded, only: {', '.join(known) or 'nothing'}. Run again with "
                f"record=[..., {quantity!r}] if nodes of this kind have that quantity"
            )
        return self.traces[key].values

    def _instead_of(self, node: str) -> str:
        """What to type instead of the name of a node that does not exist."""
        indexed = re.fullmatch(r"(.+)\[(\d+)\]", node)
        if indexed and indexed[1] in self.roles:
            return f"take a channel of the array: mean({indexed[1]!r})[..., {indexed[2]}]"
        near = difflib.get_close_matches(node, self.roles, n=1)
        return f"nodes: {', '.join(self.roles)}" + (f"; did you mean {near[0]!r}?" if near else "")

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

    def smoothed(self, node: str) -> Smoothed:
        """The belief about a node at each observation, given all observations; of a run with smooth=True."""
        if not any(key.endswith(".smoothed_mean") for key in self.traces):
            raise ResultError("nothing was smoothed; run with model.run(observations, smooth=True)")
        parts = [self.get(node, f"smoothed_{quantity}") for quantity in ("mean", "sd", "covariance")]
        if self.traces[f"{node}.smoothed_mean"].dims == ("order", "dimension"):
            parts[:2] = [part[..., 0, :] for part in parts[:2]]
        return Smoothed(*parts)

    def message(self, sender: str, receiver: str, of: str | None = None) -> Array:
        """Messages on a link, flattened, (..., time, n); recorded with Record(messages=True).

        of: the predicted node, if the link carries parameters of a mapping.
        """
        for way in ("prediction", "error"):
            trace = self.traces.get(f"{sender} to {receiver}{f' ({of})' if of else ''}.{way}")
            if trace is not None:
                return trace.values
        raise ResultError(
            f"no message from {sender!r} to {receiver!r} was recorded; run with record=Record(messages=True) and give "
            "the names of two linked nodes"
        )

    def interval(self, node: str, probability: float = 0.95) -> Interval:
        """Central credible interval, mean ± z·sd, of a node's belief."""
        return Interval.normal(self.mean(node), self.sd(node), probability)

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
        """Contribution of a node to `free_energy`, which is the sum over all nodes; (..., time)."""
        return self.get(node, "free_energy")

    def _energy(self, name: str) -> Array:
        if name not in self.traces:
            raise ResultError(f"{name} was not recorded; run with record=[..., 'energy']")
        return self.traces[name].values

    def element(self, index: int) -> Result:
        """Result of one batch element along the first batch dimension."""
        if not self.batch_shape:
            raise ResultError("this result has no batch dimensions")
        if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
            raise ResultError(f"give the number of a batch element, not {index!r}")
        if not -self.batch_shape[0] <= index < self.batch_shape[0]:
            raise ResultError(f"there is no batch element {index}; there are {self.batch_shape[0]}")
        return dataclasses.replace(
            self,
            traces={key: Trace(trace.values[index], trace.dims) for key, trace in self.traces.items()},
            batch_shape=self.batch_shape[1:],
            free_action=self.free_action[index],
            fallbacks={name: count[index] for name, count in self.fallbacks.items()},
            priors={name: Prior(*(value[index] for value in prior)) for name, prior in self.priors.items()},
            diverged=Divergence(np.asarray(self.diverged.at[index]), np.asarray(self.diverged.node[index])),
        )

    def single(self, element: int | tuple[int, ...] = 0) -> Result:
        """Result of one batch element, given its index or flat index; itself if there is no batch."""
        result, flat = self, self.flat_index(element)
        for index in np.unravel_index(flat, self.batch_shape) if self.batch_shape else ():
            result = result.element(int(index))
        return result

    def flat_index(self, element: int | tuple[int, ...]) -> int:
        """Index of a batch element in the flattened batch."""
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
        return "\n".join(lines + [f"  {key}: {trace.values.shape}" for key, trace in self.traces.items()])

    # --- tables ------------------------------------------------------------------------------------------------
    def to_xarray(self) -> xr.Dataset:
        """Dataset with one variable per trace ("x.mean") and labelled dimensions."""
        import xarray as xr

        batch = self._batch_dims()
        variables: dict[str, Any] = {}
        for key, trace in self.traces.items():
            node = key.rpartition(".")[0]
            variables[key] = ((*batch, "time", *(f"{node}.{dim}" for dim in trace.dims)), trace.values)
        variables["free_action"] = (batch, self.free_action)
        for node, count in self.fallbacks.items():
            variables[f"{node}.fallbacks"] = (batch, count)
        for node, prior in self.priors.items():
            for part, values in prior._asdict().items():
                variables[f"{node}.prior_{part}"] = ((*batch, f"{node}.prior"), values)
        variables["diverged.at"] = (batch, self.diverged.at)
        variables["diverged.node"] = (batch, self.diverged.node)
        attributes = {
            "format": FORMAT,
            "pcnet_version": package_version(),
            "observations": self.observations,
            "roles": json.dumps(self.roles),
            "dims": json.dumps({key: trace.dims for key, trace in self.traces.items()}),
            "graph": self.graph,
            "schedule": self.schedule,
            "engine": self.engine,
            "eager_ticks": self.eager_ticks,
        }
        if self.structure is not None:
            attributes["structure"] = self.structure.to_json()
        return xr.Dataset(variables, coords={"time": self.times}, attrs=attributes)

    def summary(self, probability: float = 0.95, element: int | tuple[int, ...] = 0) -> Summary:
        """What was inferred and learned, at the end of the run; print it.

        The table has mean, standard deviation and interval of each variable; of parameters and noise levels also the
        change from the prior in prior standard deviations, and whether they have settled: whether their means moved
        by less than a standard deviation in the last tenth of the run.

        Args:
            probability: Probability of the credible intervals.
            element: Batch element.
        """
        from pcnet.results.summary import summarise

        return summarise(self, probability, element)

    def to_inference_data(self, draws: int = 1000, chains: int = 4, *, seed: int = 0, element: int = 0) -> Any:
        """The beliefs at the end of the run as draws, for ArviZ (`pip install "pcnet[arviz]"`).

        The groups are `posterior`, `prior` where it is known, and `observed_data`. Draws are independent, from the
        Gaussian belief about each node, so that diagnostics of chains are those of perfect ones.

        Args:
            draws: Draws of each chain.
            chains: Number of chains.
            seed: Of the draws.
            element: Batch element.
        """
        from pcnet.results.inference_data import inference_data

        return inference_data(self.single(element), draws, chains, seed)

    def to_dataframe(self, *, long: bool = False) -> pd.DataFrame:
        """A tidy table: one row for each time, node and channel, with mean, sd, observation, prediction, … as columns.

        Args:
            long: One row for each number instead, with its quantity as a column: also covariances and messages.
        """
        import pandas as pd

        if not long:
            return self._tidy()
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

    def _tidy(self) -> pd.DataFrame:
        import pandas as pd

        keys = [*self._batch_dims(), "time", "node", "order", "dimension"]
        tables = []
        for node in self.roles:
            merged: pd.DataFrame | None = None
            for key, trace in self.traces.items():
                name, _, quantity = key.rpartition(".")
                if name != node or trace.dims not in TIDY:
                    continue
                names = [*self._batch_dims(), "time", *TIDY[trace.dims]]
                index = np.indices(trace.values.shape).reshape(len(names), -1)
                table = pd.DataFrame(dict(zip(names, index, strict=True)) | {quantity: trace.values.reshape(-1)})
                shared = [] if merged is None else [n for n in names if n in merged]
                merged = table if merged is None else merged.merge(table, "outer", shared)
            if merged is not None:
                tables.append(merged.assign(node=node, time=self.times[merged["time"].to_numpy()]))
        if not tables:
            return pd.DataFrame(columns=["time", "node", "dimension"])
        whole = pd.concat(tables, ignore_index=True)
        first = [key for key in ("time", "node", *keys) if key in whole]
        first = list(dict.fromkeys(first))
        numbered = [key for key in first if key not in ("time", "node")]
        whole[numbered] = whole[numbered].astype("Int64")
        return whole[[*first, *(column for column in whole if column not in first)]]

    def _batch_dims(self) -> tuple[str, ...]:
        if len(self.batch_shape) == 1:
            return ("batch",)
        return tuple(f"batch_{i}" for i in range(len(self.batch_shape)))

    # --- files -------------------------------------------------------------------------------------------------
    def save(self, path: str | Path) -> Path:
        """Write a NetCDF file atomically; its last line is a digest, which other readers skip."""
        import h5netcdf
        from xarray.backends import H5NetCDFStore

        path = path_of(path, ResultError)
        check_target(path)
        if path.suffix.lower() in OTHER_FORMATS:
            raise ResultError(
                f"{str(path)!r}: a result is a NetCDF file, so name it {path.stem + '.nc'!r}; a table of it is "
                "result.to_dataframe(), which has to_csv and others"
            )
        buffer = io.BytesIO()
        with h5netcdf.File(buffer, "w") as opened:
            self.to_xarray().dump_to_store(H5NetCDFStore(opened))
        with atomic_write(path) as file:
            file.write(seal(buffer.getvalue()))
        return path

    @classmethod
    def load(cls, path: str | Path) -> Result:
        """Read a file that `save` wrote; it is refused if its content does not match its digest."""
        path = path_of(path, ResultError)
        found = read_regular(path, ResultError)
        try:
            with plain_os_errors(path, "read", ResultError):
                content = unseal(found)  # before anything else looks at it
        except ValueError as error:
            raise ResultError(f"{str(path)!r} is damaged: {error}") from None
        data = _dataset(path, found if content is None else content)
        missing = {"format", "roles", "dims", "graph", "schedule", "observations"} - set(data.attrs)
        if missing:
            raise ResultError(f"{str(path)!r} was not written by pcnet: it lacks {', '.join(sorted(missing))}")
        try:
            version = int(data.attrs["format"])
            if version > FORMAT:
                raise ResultError(f"{str(path)!r} has format {version}; this pcnet reads up to {FORMAT}: update pcnet")
            if version >= 3 and content is None:
                raise ResultError(f"{str(path)!r} is damaged, or was changed by another program: it has no digest")
            return cls._of(data)
        except ResultError:
            raise
        except Exception as error:
            raise ResultError(f"{str(path)!r} has not the content of a result: {error!r}") from None

    @classmethod
    def _of(cls, data: xr.Dataset) -> Result:
        """The result that `to_xarray` gave."""
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
            graph=data.attrs["graph"],
            priors={
                name: Prior(data[f"{name}.prior_mean"].values, data[f"{name}.prior_sd"].values)
                for name in json.loads(data.attrs["roles"])
                if f"{name}.prior_mean" in data
            },
            schedule=data.attrs["schedule"],
            engine=str(data.attrs.get("engine", "eager")),
            eager_ticks=int(data.attrs.get("eager_ticks", data.attrs["observations"])),
            structure=GraphSummary.from_json(data.attrs["structure"]) if "structure" in data.attrs else None,
        )

    # --- figures -----------------------------------------------------------------------------------------------
    def plot(
        self,
        truth: Any = None,
        true_parameters: Any = None,
        *,
        true_precisions: Any = None,
        parts: Sequence[str] | None = None,
        element: int | tuple[int, ...] = 0,
        title: str | None = None,
        probability: float = 0.95,
        labels: Mapping[str, Sequence[str]] | None = None,
        dark: bool = False,
    ) -> Figure:
        """One page of figures over time: states, observations, parameters, precisions and free energy.

        Args:
            truth: True states, (T, dim), for every observation or every recorded one; a mapping from names of states
                and causes to these if there are several.
            true_parameters: True parameters, (p,), or a mapping from names to these.
            true_precisions: True log-precisions, in the same form.
            parts: Some of "states", "causes", "observations", "parameters", "precisions" and "free energy"; all that
                there are unless given.
            element: Batch element.
            title: The number of observations and the free action unless given.
            probability: Probability of the credible intervals.
            labels: Labels of the channels by node, for example {"theta": ["a₁₂", "a₁₃", "a₂₃"]}.
            dark: Use the dark theme.
        """
        from pcnet.results.plots import overview

        return overview(
            *(self, truth, true_parameters),
            true_precisions=true_precisions,
            parts=parts,
            element=element,
            title=title,
            probability=probability,
            labels=labels,
            dark=dark,
        )

    def error_flow(self, element: int | tuple[int, ...] = 0) -> ErrorFlow:
        """Prediction errors and messages over time, of a run with record=Record.flow(); see `ErrorFlow`."""
        from pcnet.results.error_flow import ErrorFlow

        return ErrorFlow(self, element)


def _dataset(path: Path, content: bytes) -> xr.Dataset:
    """The content of a NetCDF file."""
    import xarray as xr

    try:
        with xr.open_dataset(io.BytesIO(content), engine="h5netcdf") as opened:
            return opened.load()
    except Exception as error:
        raise ResultError(
            f"{str(path)!r} is not a NetCDF file, or it is damaged: {error}; give a file that result.save() or "
            "`pcnet run --output` wrote"
        ) from None


def package_version() -> str:
    try:
        return version("pcnet")
    except PackageNotFoundError:
        return "unknown"

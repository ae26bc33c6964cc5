"""A study: many model inversions on the same data, as a table and for model comparison and averaging."""

from __future__ import annotations

import itertools
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pcnet.errors import StudyError
from pcnet.files import path_of
from pcnet.model.digest import digest
from pcnet.model.model import Model
from pcnet.results.downsample import Array
from pcnet.results.recorder import Record
from pcnet.results.result import Result
from pcnet.sweeps import comparison
from pcnet.sweeps.batching import batch_key, stack_models
from pcnet.sweeps.comparison import Average
from pcnet.sweeps.evaluate import Build, Data, build_model, fingerprint, parse_data
from pcnet.sweeps.store import COLUMNS, NESTED, Store

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Where = Mapping[str, Any]  # selection of inversions: a value, or a list of values, by column of the table


class Study:
    """The inversions of a sweep; made by `pcnet.sweep(...)`, or read from its file by `Study.open(path)`.

    Args:
        build, data: Arguments of the sweep, which the file does not contain.
    """

    def __init__(self, store: Store, build: Build | None = None, data: Data | None = None) -> None:
        self._store, self._build, self._data = store, build, data

    @classmethod
    def open(cls, path: str | Path) -> Study:
        """Read the file of a study, also while a sweep is writing to it."""
        return cls(Store(path_of(path, StudyError), create=False))

    @property
    def path(self) -> Path | None:
        return self._store.path

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of inversions that are open, done, diverged, or failed because they could not be built."""
        return self._store.counts()

    def __repr__(self) -> str:
        where = "in memory" if self.path is None else repr(str(self.path))
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        return f"<Study {where}: {counts}>"

    # --- table ------------------------------------------------------------------------------------------------------
    def to_dataframe(self, where: Where | None = None) -> pd.DataFrame:
        """Table with one row per inversion: settings, replicate, status, energies, scores and final beliefs.

        Scores have columns such as "x.mse", final beliefs "theta.mean[0]" and, of states, "x.mean[order,dimension]".

        Args:
            where: Values, or lists of values, by column; all inversions by default.
        """
        import pandas as pd

        table = pd.DataFrame([_flat(row) for row in self._store.rows()])
        if table.empty:
            raise StudyError("the study is empty")
        table = table.set_index("id")
        for name in ("free_action", "accuracy", "complexity", "diverged_at", "seconds"):
            table[name] = table[name].astype(float)
        return _select(table, where)

    def best(
        self, by: Sequence[str] | str = (), where: Where | None = None, score: str = "free_action"
    ) -> pd.DataFrame:
        """Rows of the inversions with the lowest score in each group; open inversions are left out.

        Args:
            by: Columns that define the groups; one group by default.
            where: Selection of inversions.
            score: Column to minimise. Free actions of different data are not comparable and raise an error.
        """
        by = [by] if isinstance(by, str) else list(by)
        table = self.to_dataframe(where)
        for name in (*by, score):
            if name not in table:
                raise no_column(name, table)
        table = table[table["status"] == "done"]
        if table.empty:
            raise StudyError("none of these inversions is done, or all of them diverged")
        groups = [table] if not by else [group for _, group in table.groupby(by, sort=True, dropna=False)]
        for group in groups:
            if score == "free_action":
                same_data(group)
        return table.loc[[group[score].idxmin() for group in groups if group[score].notna().any()]]

    def plot(self, x: str | None = None, y: str | None = None, **options: Any) -> Figure:
        """Free action and errors over one or two settings; see `pcnet.sweeps.study_plots.overview`."""
        from pcnet.sweeps.study_plots import overview

        return overview(self, x, y, **options)

    # --- model comparison -------------------------------------------------------------------------------------------
    def probabilities(self, where: Where | None = None, prior: Sequence[float] | None = None) -> pd.DataFrame:
        """Posterior probabilities of the settings, highest first.

        Free actions are summed over replicates. A setting that diverged has probability 0.

        Args:
            where: Selection of inversions.
            prior: One number per setting, in the order of `to_dataframe(where)`; uniform by default.
        """
        models = self._models(where)
        weights = _probabilities(models, prior)
        return models.assign(probability=weights).sort_values("probability", ascending=False, kind="stable")

    def compare(self, family: str, where: Where | None = None) -> pd.DataFrame:
        """Log evidence and posterior probability of families of models, grouped by the values of one setting."""
        import pandas as pd

        models = self._models(where)
        if family not in models:
            raise StudyError(f"there is no setting {family!r}; settings: {', '.join(self._settings(models))}")
        families = comparison.families(models["free_action"].to_numpy(float), models[family].tolist())
        table = pd.DataFrame(families).rename(columns={"name": family}).set_index(family)
        lowest = models.groupby(family, sort=False)["free_action"].min()
        return table.assign(lowest_free_action=lowest).sort_values("probability", ascending=False, kind="stable")

    def average(self, node: str, where: Where | None = None, prior: Sequence[float] | None = None) -> Average:
        """Bayesian model average of the final belief of a node.

        Args:
            where: Selection of inversions.
            prior: One number per row of `to_dataframe(where)`; uniform by default.
        """
        table = finished(self.to_dataframe(where))
        if table["replicate"].nunique() > 1:
            raise StudyError("beliefs of several replicates cannot be averaged; select one: where={'replicate': 0}")
        same_data(table)
        weights = _probabilities(table, prior)
        columns = [name for name in table if str(name).startswith(f"{node}.mean[")]
        if not columns:
            raise StudyError(f"there is no belief of {node!r} in the study")
        possible = weights > 0
        known = table.loc[possible, columns].notna().to_numpy()
        if not (known == known[0]).all():
            raise StudyError(f"{node!r} has not the same dimensions in all models; select models by where=")
        columns = [name for name, each in zip(columns, known[0], strict=True) if each]
        means = table.loc[possible, columns].to_numpy(float)
        sds = table.loc[possible, [str(name).replace(".mean[", ".sd[") for name in columns]].to_numpy(float)
        return comparison.average(means, sds, weights[possible])

    def _models(self, where: Where | None) -> pd.DataFrame:
        """One row per setting with its free action summed over replicates; NaN if one of them diverged."""
        table = finished(self.to_dataframe(where))
        for _, group in table.groupby("replicate"):
            same_data(group)
        settings = self._settings(table)
        replicates = table["replicate"].nunique()
        grouped = table.groupby(settings, sort=False, dropna=False) if settings else table.groupby("status")
        models = grouped["free_action"].sum(min_count=replicates).reset_index()
        if replicates > 1 and int((grouped.size() != replicates).sum()):
            raise StudyError("some settings have not been inverted for all replicates; select replicates by where=")
        return models

    @property
    def settings(self) -> list[str]:
        """Names of all settings."""
        return list(dict.fromkeys(itertools.chain.from_iterable(row["settings"] for row in self._store.rows())))

    def _settings(self, table: pd.DataFrame) -> list[str]:
        return [name for name in self.settings if name in table]

    # --- running again ----------------------------------------------------------------------------------------------
    def rerun(
        self,
        rows: pd.DataFrame,
        record: Record | Sequence[str] | None = None,
        *,
        build: Build | None = None,
        observations: Any = None,
    ) -> dict[int, Result]:
        """Run some inversions again, in batches, and return their full results by inversion id.

        Args:
            rows: Rows of a table of this study, with their index.
            record: What to record.
            build, observations: As given to the sweep; required if the study was opened from its file.
        """
        import pandas as pd

        known = {row["id"]: row for row in self._store.rows()}
        if not isinstance(rows, pd.DataFrame) or rows.index.name != "id" or not set(rows.index) <= set(known):
            raise StudyError("rerun takes rows of to_dataframe() or best() of this study, with their index")
        wanted = [known[int(number)] for number in rows.index]
        build = build or self._build
        if build is None or (self._data is None and observations is None):
            raise StudyError("a study that was read from a file needs build= and observations= to run anything again")
        digests, models, groups = self._store.digests_by_id(), dict[int, Model](), dict[Hashable, list[int]]()
        for row in wanted:
            models[row["id"]] = model = build_model(build, row["settings"])
            if digest(model) != digests[row["id"]]:
                raise StudyError(f"build makes another model of {row['settings']} than when the study was made")
            groups.setdefault(batch_key(model), []).append(row["id"])
        data = self._data
        if data is None or observations is not None:
            data = parse_data(observations, {}, next(iter(models.values())))
            if fingerprint(data.observations) != self._store.metadata("observations"):
                raise StudyError("the study was made from other observations; give those of the sweep")
        results: dict[int, Result] = {}
        for ids in groups.values():
            replicates = [known[number]["replicate"] for number in ids]
            seen = {name: values[replicates] for name, values in data.observations.items()}
            model = stack_models([models[number] for number in ids])
            result = model.run(seen, record=record, on_divergence="stop", screen=False, progress=False)
            results |= {number: result.element(i) for i, number in enumerate(ids)}
        return {number: results[number] for number in models}


def _probabilities(table: pd.DataFrame, prior: Sequence[float] | None) -> Array:
    weights = None if prior is None else np.asarray(prior)
    return comparison.probabilities(table["free_action"].to_numpy(float), weights)


RESERVED = frozenset(COLUMNS)  # names of table columns, which settings cannot have


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table: scores, fallbacks and beliefs become columns of their own."""
    settings = {name: _hashable(value) for name, value in row["settings"].items()}
    columns = {"id": row["id"], **settings, **{name: row[name] for name in COLUMNS if name not in (*NESTED, "id")}}
    for node, scores in row["scores"].items():
        columns |= {f"{node}.{name}": value for name, value in scores.items()}
    columns |= {f"{node}.fallbacks": count for node, count in row["fallbacks"].items()}
    for node, belief in row["beliefs"].items():
        for quantity, values in belief.items():
            for index, value in np.ndenumerate(np.array(values, dtype=object)):
                columns[f"{node}.{quantity}[{','.join(map(str, index))}]"] = value
    return columns


def _hashable(value: Any) -> Any:
    """A setting that pandas can group by: lists become tuples."""
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


def _select(table: pd.DataFrame, where: Where | None) -> pd.DataFrame:
    for name, value in (where or {}).items():
        if name not in table:
            raise no_column(name, table)
        values = value if isinstance(value, (list, tuple, set, np.ndarray)) else []
        wanted = [_hashable(value), *map(_hashable, values)]  # a setting may itself be a list
        table = table[table[name].isin(wanted)]
        if table.empty:
            raise StudyError(f"no inversion has {name} = {value!r}")
    return table


def no_column(name: str, table: pd.DataFrame) -> StudyError:
    columns = [str(column) for column in table.columns if "[" not in str(column)]
    return StudyError(f"there is no column {name!r}; columns: {', '.join(columns)}, and final beliefs")


def finished(table: pd.DataFrame) -> pd.DataFrame:
    """Those inversions that could be built. All must be finished: an open one could turn out to be the best."""
    count = int((table["status"] == "open").sum())
    if count:
        raise StudyError(
            f"{count} inversions are still open; finish the sweep first, or compare the finished ones with "
            "where={'status': ['done', 'diverged', 'failed']}"
        )
    return table[table["status"] != "failed"]


def same_data(group: pd.DataFrame) -> None:
    """Check that the free actions of a group belong to the same data."""
    if group["replicate"].nunique() > 1:
        raise StudyError(
            "free actions of different replicates belong to different observations and cannot be compared; add "
            "'replicate' to by=, or select one: where={'replicate': 0}"
        )
    processed = group["data"].unique()
    if len(processed) <= 1:
        return
    first, second = (json.loads(each) for each in processed[:2])
    differences = []
    for node in {**first, **second}:
        a, b = first.get(node), second.get(node)
        if a is None or b is None:
            differences.append(f"{node!r} is observed in one and not in the other")
        else:
            differences += [f"{node!r} has {key} {a[key]} and {b[key]}" for key in a if a[key] != b.get(key)]
    name, advice = next(_settings_of_data(group), None), "compare models that have these in common"
    if name is not None:
        value = group[name].tolist()[0]
        advice = f"compare within one of them: where={{{name!r}: {value!r}}}, or (for best) by=[…, {name!r}]"
    raise StudyError(
        f"these models see different data: {'; '.join(differences)}. With other orders of motion or another sampling "
        "interval the generalised observations are different numbers, and evidence for different data cannot be "
        f"compared; {advice}"
    )


def _settings_of_data(group: pd.DataFrame) -> Iterator[str]:
    """Settings whose values distinguish the different data."""
    for name in map(str, group.columns):
        if name not in RESERVED and "." not in name:
            by_data = [set(each.dropna()) for _, each in group.groupby("data")[name]]
            if all(by_data) and sum(map(len, by_data)) == len(set().union(*by_data)):
                yield name

"""A study: many inversions of models on the same data, to be looked at, compared and averaged."""

from __future__ import annotations

import itertools
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pcnet.errors import StudyError
from pcnet.model.digest import digest
from pcnet.model.model import Model
from pcnet.results.recorder import Record
from pcnet.results.result import Result
from pcnet.sweeps import comparison
from pcnet.sweeps.batching import form, together
from pcnet.sweeps.comparison import Average
from pcnet.sweeps.evaluate import Build, Data, built, fingerprint, given_data
from pcnet.sweeps.store import Row, Store

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Where = Mapping[str, Any]
"""Which inversions: a value, or a list of them, for columns of the table."""


class Source:
    """What a study was made from, as long as it is at hand: it is not in the file."""

    def __init__(self, build: Build, data: Data) -> None:
        self.build = build
        self.data = data


class Study:
    """The inversions of a sweep. Made by `pcnet.sweep(...)`, or read from its file by `Study.open(path)`."""

    def __init__(self, store: Store, source: Source | None = None) -> None:
        self._store = store
        self._source = source

    @classmethod
    def open(cls, path: str | Path) -> Study:
        """A study's file as it is now, also while a sweep is at work on it."""
        return cls(Store(Path(path), create=False))

    @property
    def path(self) -> Path | None:
        return self._store.path

    @property
    def counts(self) -> dict[str, int]:
        """How many inversions are open, done and diverged."""
        return self._store.counts()

    def __repr__(self) -> str:
        where = "in memory" if self.path is None else repr(str(self.path))
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        return f"<Study {where}: {counts}>"

    # --- looking ----------------------------------------------------------------------------------------------------
    def to_dataframe(self, where: Where | None = None) -> pd.DataFrame:
        """A row for each inversion: settings, replicate, status, free action, accuracy, complexity, scores, beliefs.

        Scores are columns such as "x.mse", final beliefs such as "theta.mean[0]" (for a state [order,dimension]).
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
        self,
        by: Sequence[str] | str = (),
        where: Where | None = None,
        score: str = "free_action",
    ) -> pd.DataFrame:
        """The inversion with the lowest score in each group, in the order of the groups.

        Free actions are compared within the same data only. Others, such as "x.mse", may be compared at will. What is
        still open is left out.
        """
        by = [by] if isinstance(by, str) else list(by)
        table = self.to_dataframe(where)
        for name in (*by, score):
            if name not in table:
                raise no_column(name, table)
        table = table[table["status"] == "done"]
        if table.empty:
            raise StudyError("no inversion of these is done, or all of them diverged")
        groups = [table] if not by else [group for _, group in table.groupby(by, sort=True, dropna=False)]
        for group in groups:
            if score == "free_action":
                same_data(group)
        found = [group[score].idxmin() for group in groups if group[score].notna().any()]
        return table.loc[found]

    def plot(self, x: str | None = None, y: str | None = None, **options: Any) -> Figure:
        """Free action and errors over two settings, with the best of each group; see `pcnet.study_plots.overview`."""
        from pcnet.sweeps.study_plots import overview

        return overview(self, x, y, **options)

    # --- comparing ----------------------------------------------------------------------------------------------------
    def probabilities(self, where: Where | None = None, prior: Sequence[float] | None = None) -> pd.DataFrame:
        """The settings with their posterior probabilities, the likeliest first.

        Over several replicates the free actions of a setting are added. One that diverged has probability 0.
        prior: one number for each setting, in the order in which they come in `to_dataframe(where)`; even unless given.
        """
        models = self._models(where)
        weights = comparison.probabilities(
            models["free_action"].to_numpy(float), None if prior is None else np.asarray(prior)
        )
        return models.assign(probability=weights).sort_values("probability", ascending=False, kind="stable")

    def compare(self, family: str, where: Where | None = None) -> pd.DataFrame:
        """Families of settings, told apart by one of them, with log evidence and posterior probability."""
        import pandas as pd

        models = self._models(where)
        if family not in models:
            raise StudyError(f"there is no setting {family!r}; settings: {', '.join(self._settings(models))}")
        names: list[Hashable] = models[family].tolist()
        found = comparison.families(models["free_action"].to_numpy(float), names)
        table = pd.DataFrame(found).rename(columns={"name": family}).set_index(family)
        lowest = models.groupby(family, sort=False)["free_action"].min()
        return table.assign(lowest_free_action=lowest).sort_values("probability", ascending=False, kind="stable")

    def average(self, node: str, where: Where | None = None, prior: Sequence[float] | None = None) -> Average:
        """Bayesian model average of a node's final belief, over all settings that are compared.

        prior: one number for each row of `to_dataframe(where)`; even unless given.
        """
        table = finished(self.to_dataframe(where))
        if table["replicate"].nunique() > 1:
            raise StudyError("beliefs of several replicates cannot be averaged; choose one: where={'replicate': 0}")
        same_data(table)
        weights = comparison.probabilities(
            table["free_action"].to_numpy(float), None if prior is None else np.asarray(prior)
        )
        columns = [name for name in table if str(name).startswith(f"{node}.mean[")]
        if not columns:
            raise StudyError(f"there is no belief of {node!r} in the study")
        counted = weights > 0
        held = table.loc[counted, columns].notna().to_numpy()
        if not (held == held[0]).all():
            raise StudyError(
                f"{node!r} has not the same dimensions in all models; choose those that share them by where="
            )
        columns = [name for name, there in zip(columns, held[0], strict=True) if there]
        means = table.loc[counted, columns].to_numpy(float)
        sds = table.loc[counted, [str(name).replace(".mean[", ".sd[") for name in columns]].to_numpy(float)
        return comparison.average(means, sds, weights[counted])

    def _models(self, where: Where | None) -> pd.DataFrame:
        """A row for each setting, its free actions added over the replicates; NaN where one of them is lacking."""
        table = finished(self.to_dataframe(where))
        for _, group in table.groupby("replicate"):
            same_data(group)
        settings = self._settings(table)
        replicates = table["replicate"].nunique()
        grouped = table.groupby(settings, sort=False, dropna=False) if settings else table.groupby("status")
        models = grouped["free_action"].sum(min_count=replicates).reset_index()
        if replicates > 1 and int((grouped.size() != replicates).sum()):
            raise StudyError("some settings have not been inverted for all replicates; choose by where=")
        return models

    @property
    def settings(self) -> list[str]:
        """The names of the settings that inversions may differ in."""
        return list(dict.fromkeys(itertools.chain.from_iterable(row.settings for row in self._store.rows())))

    def _settings(self, table: pd.DataFrame) -> list[str]:
        return [name for name in self.settings if name in table]

    # --- running again ------------------------------------------------------------------------------------------------
    def rerun(
        self,
        rows: pd.DataFrame,
        record: Record | Sequence[str] | None = None,
        *,
        build: Build | None = None,
        observations: Any = None,
    ) -> dict[int, Result]:
        """Full results of some inversions (rows of a table of this study), by their numbers; run anew, in batches.

        build, observations: as given to the sweep; needed if the study was opened from its file.
        """
        import pandas as pd

        known = {row.id: row for row in self._store.rows()}
        if not isinstance(rows, pd.DataFrame) or rows.index.name != "id" or not set(rows.index) <= set(known):
            raise StudyError("rerun takes rows of to_dataframe() or best() of this study, with their index")
        wanted = [known[int(number)] for number in rows.index]
        if self._source is not None:
            build = build or self._source.build
        if build is None or (self._source is None and observations is None):
            raise StudyError("a study that was read from a file needs build= and observations= to run anything again")
        models = {row.id: built(build, row.settings) for row in wanted}
        data = self._data(observations, wanted, models)
        groups: dict[Hashable, list[Row]] = {}
        for row in wanted:
            groups.setdefault(form(models[row.id]), []).append(row)
        results: dict[int, Result] = {}
        for group in groups.values():
            model = together([models[row.id] for row in group])
            which = [row.replicate for row in group]
            seen = {name: values[which] for name, values in data.observations.items()}
            result = model.graph.run(seen, model.schedule, record=record, on_divergence="stop", progress=False)
            results |= {row.id: result.element(i) for i, row in enumerate(group)}
        return {row.id: results[row.id] for row in wanted}

    def _data(self, observations: Any, rows: list[Row], models: Mapping[int, Model]) -> Data:
        """What to run models on again, if that and they are the same as in the study."""
        marks = self._store.models()
        for row in rows:
            if digest(models[row.id]) != marks[row.id]:
                raise StudyError(f"build makes another model of {row.settings} than when the study was made")
        if observations is None:
            assert self._source is not None
            return self._source.data
        data = given_data(observations, {}, next(iter(models.values())))
        if fingerprint(data.observations) != self._store.about("observations"):
            raise StudyError("the study was made from other observations")
        return data


def _flat(row: Row) -> dict[str, Any]:
    """A row as columns."""
    own = {name: value for name, value in row._asdict().items() if name not in ("settings", *NESTED)}
    settings = {name: _hashable(value) for name, value in row.settings.items()}
    columns: dict[str, Any] = {"id": own.pop("id"), **settings, **own}
    for node, figures in row.scores.items():
        columns |= {f"{node}.{name}": value for name, value in figures.items()}
    columns |= {f"{node}.fallbacks": count for node, count in row.fallbacks.items()}
    for node, belief in row.beliefs.items():
        for quantity, values in belief.items():
            columns |= {f"{node}.{quantity}[{at}]": value for at, value in _numbered(values)}
    return columns


NESTED = ("scores", "beliefs", "fallbacks")
RESERVED = frozenset(Row._fields)
"""Names that settings cannot have, since columns of the table have them."""


def _hashable(value: Any) -> Any:
    """A setting as a table can group by it: lists become tuples."""
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


def _numbered(values: Any) -> Iterator[tuple[str, Any]]:
    """The numbers of nested lists, each with its index as text."""
    if not isinstance(values, list):
        yield "", values
        return
    for i, inner in enumerate(values):
        for rest, value in _numbered(inner):
            yield (f"{i},{rest}" if rest else str(i)), value


def _select(table: pd.DataFrame, where: Where | None) -> pd.DataFrame:
    for name, value in (where or {}).items():
        if name not in table:
            raise no_column(name, table)
        several = value if isinstance(value, (list, tuple, set, np.ndarray)) else []
        wanted = [_hashable(value), *map(_hashable, several)]  # a setting may itself be a list
        table = table[table[name].isin(wanted)]
        if table.empty:
            raise StudyError(f"no inversion has {name} = {value!r}")
    return table


def no_column(name: str, table: pd.DataFrame) -> StudyError:
    columns = [str(column) for column in table.columns if "[" not in str(column)]
    return StudyError(f"there is no column {name!r}; columns: {', '.join(columns)}, and final beliefs")


def finished(table: pd.DataFrame) -> pd.DataFrame:
    """Refuse to weigh models while some of them may yet turn out to be better."""
    count = int((table["status"] == "open").sum())
    if count:
        raise StudyError(
            f"{count} inversions are still open; finish the sweep first, or compare what is there already by "
            "where={'status': ['done', 'diverged']}"
        )
    return table


def same_data(group: pd.DataFrame) -> None:
    """Refuse to compare free actions of different data."""
    if group["replicate"].nunique() > 1:
        raise StudyError(
            "free actions of different replicates are of different observations and cannot be compared; add "
            "'replicate' to by=, or choose one: where={'replicate': 0}"
        )
    found = group["data"].unique()
    if len(found) == 1:
        return
    first, second = (json.loads(each) for each in found[:2])
    differing = []
    for node in {**first, **second}:
        a, b = first.get(node), second.get(node)
        if a is None or b is None:
            differing.append(f"{node!r} is observed in one and not in the other")
        else:
            differing += [f"{node!r} has {key} {a[key]} and {b[key]}" for key in a if a[key] != b.get(key)]
    settings = _telling(group)
    advice = (
        f"compare within one of them: where={{{settings[0]!r}: {_plain(group[settings[0]].iloc[0])!r}}}, or (for best) "
        f"by=[…, {settings[0]!r}]"
        if settings
        else "compare those that share them"
    )
    raise StudyError(
        f"these models see different data: {'; '.join(differing)}. With other orders of motion or another sampling "
        "interval the generalised observations are other numbers, and evidence for different data cannot be compared; "
        f"{advice}"
    )


def _telling(group: pd.DataFrame) -> list[str]:
    """The settings that tell the different data apart."""
    own = set(RESERVED)
    found = []
    for name in map(str, group.columns):
        if name in own or "." in name:
            continue
        by_data = [set(each.dropna()) for _, each in group.groupby("data")[name]]
        if all(by_data) and sum(map(len, by_data)) == len(set().union(*by_data)):
            found.append(name)
    return found


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value

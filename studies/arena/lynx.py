"""The lynx and hare record of the Hudson's Bay Company: each year forecast from the years before."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pcnet.files import atomic_write
from studies.arena import flows
from studies.arena.beliefs import Ahead, Array
from studies.arena.cells import code_of
from studies.arena.methods import METHODS, use_one_thread
from studies.arena.model import Record
from studies.arena.tasks import Task
from studies.systems.design import System

RECORD = Path(__file__).parents[2] / "examples" / "lynx_hare.csv"
FIRST = 9  # place of the first year that is an origin
HORIZONS = (1, 3)  # years


def _predator_prey(x: Tensor, p: Tensor) -> Tensor:
    rate, animals = p.exp(), x.exp()
    prey = rate[..., 0] - rate[..., 1] * animals[..., 1]
    return torch.stack([prey, rate[..., 3] * animals[..., 0] - rate[..., 2]], -1)


TASK = Task(
    System(
        "Lynx and hare pelts, 1900–1920",
        "21 years",
        _predator_prey,
        (math.nan,) * 4,  # nobody knows
        tuple(math.log(rate) for rate in (1.0, 0.05, 1.0, 0.05)),
        (0.7,) * 4,
        (3.0, 3.0),
        (1.0, 1.0),
        (0.1, 0.1),
        (0.1, 0.1),
        1.0,
        21,
        lambda x: x,
    ),
    flows.predator_prey,
    flows.element(0, 1),
)
"""The priors of the rates are those of a tutorial on this record, as logs. Noise is not told to anybody."""
CONTESTANTS = ("pcnet", "dynamax-ekf", "dynamax-ukf", "filterpy")


def read_record() -> Record:
    """Years since the first, and logs of pelts of hares and lynxes in thousands."""
    with RECORD.open(encoding="utf-8") as lines:
        table = np.array([[float(cell) for cell in row] for row in list(csv.reader(lines))[1:]])
    return Record(table[:, 0] - table[0, 0], np.log(table[:, 1:]), np.zeros((len(table), 4)))


def measure_forecasts(folder: Path) -> list[dict[str, Any]]:
    """One row per method and horizon: error of log pelts, coverage and log-score; read if code is the same."""
    path = folder / "lynx.json"
    code = {name: code_of(name) for name in CONTESTANTS}
    if path.exists():
        before: dict[str, Any] = json.loads(path.read_text())
        if before["code"] == code:
            rows: list[dict[str, Any]] = before["rows"]
            return rows
    use_one_thread()
    record = read_record()
    rows = [score("same as in the year of the origin", record, steps, _persistence(record)) for steps in HORIZONS]
    for name in CONTESTANTS:
        method = METHODS[name]
        if method.missing():
            continue
        try:
            beliefs = method.build(TASK, "neither")(record)
            assert beliefs.ahead is not None
            assert beliefs.noise is not None
            noise = np.asarray(beliefs.noise.y)
            rows += [score(method.title, record, steps, beliefs.ahead, noise) for steps in HORIZONS]
        except Exception as error:  # a failure is a result
            rows.append({"title": method.title, "failure": f"{type(error).__name__}: {error}".splitlines()[0][:120]})
    with atomic_write(path) as file:
        file.write(json.dumps({"code": code, "rows": rows}).encode())
    return rows


def _persistence(record: Record) -> Callable[[list[int], int], Ahead]:
    """The last value, with the standard deviation of such differences before the first origin."""

    def ahead(places: list[int], steps: int) -> Ahead:
        y = record.observations
        sd = (y[steps : FIRST + 1] - y[: FIRST + 1 - steps]).std(0)
        return Ahead(y[places], np.tile(sd, (len(places), 1)))

    return ahead


def score(title: str, record: Record, steps: int, ahead: Any, noise: Array | float = 0.0) -> dict[str, Any]:
    """Scores of forecasts of one horizon from all years from FIRST on."""
    y = record.observations
    places = list(range(FIRST, len(y) - steps))
    found = ahead(places, steps)
    sd = np.sqrt(found.sd**2 + np.asarray(noise) ** 2) if found.sd_y is None else found.sd_y
    error = y[[place + steps for place in places]] - found.mean
    density = -0.5 * (error / sd) ** 2 - np.log(sd) - 0.5 * math.log(2 * math.pi)
    return {
        "title": title,
        "steps": steps,
        "error": float(np.sqrt((error**2).mean())),
        "coverage": float((np.abs(error) <= 2 * sd).mean()),
        "log_score": float(density.mean()),
        "count": int(error.size),
    }

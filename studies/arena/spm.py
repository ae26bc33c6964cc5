"""SPM's dynamic expectation maximisation, recorded: its estimates on its own data, beside pcnet's on the same data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pcnet.graphs import Cause, adaptive_filter

DATA = Path(__file__).parents[2] / "tests" / "data"
"""Input and output of `spm_DEM` under GNU Octave; the README of that folder says how they were made."""


class Comparison(NamedTuple):
    """One error of SPM and of pcnet."""

    model: str
    measure: str
    spm: float
    filtered: float
    smoothed: float


def compare() -> list[Comparison]:
    """Errors on both records; empty where the data are not shipped."""
    if not (DATA / "spm_lorenz.npz").exists():
        return []
    return [*_lorenz(), *_convolution()]


def _lorenz() -> list[Comparison]:
    """From a wrong start; SPM is told precisions and smoothness, pcnet only that the start may be wrong by 10."""
    data = np.load(DATA / "spm_lorenz.npz")
    sigma, beta, rho = data["M1_pE_vec"].ravel()

    def flow(x: Tensor, _: Tensor) -> Tensor:
        a, b, c = x.unbind(-1)
        return torch.stack([sigma * (b - a), (rho - 2 * c) * a - b, 2 * a * b + beta * c], -1) / 32

    model = adaptive_filter(
        flow,
        3,
        1.0,
        mapping=lambda x, _: x.sum(-1, keepdim=True),
        initial_mean=data["M1_x"].ravel(),
        initial_sd=10.0,
    )
    result = model.run(data["Y"].T, progress=False, smooth=True)
    truth = data["pU_x1"].T
    errors = [(each - truth) ** 2 for each in (data["qU_x1"].T, result.mean("x")[:, 0], _smoothed(result, "x", 3))]
    return [
        Comparison("Lorenz attractor from a wrong start, 64 samples", measure, *(float(e[part].mean()) for e in errors))
        for measure, part in (("mean squared error", slice(None)), ("the same, second half", slice(32, None)))
    ]


def _convolution() -> list[Comparison]:
    """States and cause; SPM is told precisions and smoothness, pcnet that the cause lasts for about two samples."""
    data = np.load(DATA / "spm_convolution.npz")
    f, h, g = (torch.tensor(data[f"M1_pE_{name}"]) for name in "fhg")

    def flow(x: Tensor, v: Tensor, _: Tensor) -> Tensor:
        return x @ f.T.to(x) + v @ h.T.to(x)

    def mapping(x: Tensor, _v: Tensor, _: Tensor) -> Tensor:
        return x @ g.T.to(x)

    functions: dict[str, Any] = {"flow": flow, "mapping": mapping}  # of a cause as well
    model = adaptive_filter(
        dim=2,
        dt=1.0,
        **functions,
        causes={"v": Cause(correlation_time=2.0)},  # type: ignore[arg-type]
        process_noise_sd=data["M1_W"][0, 0] ** -0.5,
        observation_noise_sd=data["M1_V"][0, 0] ** -0.5,
        initial_mean=[0.0, 0.0],
        initial_sd=0.1,
    )
    result = model.run(data["Y"].T, progress=False, smooth=True)
    found = []
    for name, title, key, dim in (("x", "states", "x1", 2), ("v", "cause", "v2", 1)):
        truth = data[f"pU_{key}"].T
        estimates = data[f"qU_{key}"].T, result.mean(name).reshape(-1, dim), _smoothed(result, name, dim)
        errors = [float(((each - truth) ** 2).sum()) for each in estimates]
        found.append(Comparison("Convolution model, 32 samples", f"sum of squared errors, {title}", *errors))
    return found


def _smoothed(result: Any, node: str, dim: int) -> Any:
    return np.asarray(result.smoothed(node).mean).reshape(-1, dim)

"""Results for ArviZ: beliefs at the end of a run as draws."""

from __future__ import annotations

from typing import Any

import numpy as np

from pcnet.errors import ResultError
from pcnet.results.downsample import Array
from pcnet.results.result import Result


def inference_data(single: Result, draws: int, chains: int, seed: int) -> Any:
    """An `arviz.InferenceData` of a result without batch dimensions; see `Result.to_inference_data`."""
    try:
        import arviz as az
    except ImportError:
        raise ResultError('to_inference_data needs ArviZ: pip install "pcnet[arviz]"') from None
    for name, value in (("draws", draws), ("chains", chains)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ResultError(f"{name} must be a whole number, 1 or more, not {value!r}")
    generator = np.random.default_rng(seed)
    shape = (chains, draws)
    posterior, prior, observed = {}, {}, {}
    for name, role in single.roles.items():
        if f"{name}.observation" in single.traces:
            observed[name] = _first(single.observation(name))
        if not all(f"{name}.{quantity}" in single.traces for quantity in ("mean", "sd")) or not len(single.times):
            continue
        mean, sd = (_first(single.get(name, quantity))[-1] for quantity in ("mean", "sd"))
        noise = generator.standard_normal((*shape, len(mean)))
        covariance = single.traces.get(f"{name}.covariance")
        if covariance is not None and covariance.values.shape[-1] == len(mean):
            values, vectors = np.linalg.eigh(covariance.values[-1])
            posterior[name] = mean + noise * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
        else:
            posterior[name] = mean + sd * noise
        if role in ("parameter", "precision") and name in single.priors:
            first = single.priors[name]
            prior[name] = first.mean + first.sd * generator.standard_normal((*shape, len(first.mean)))
    if not posterior:
        raise ResultError("no means and standard deviations were recorded; run with record=['mean', 'sd']")
    coords = {"time": single.times}
    dims = {name: ["time", f"{name}_channel"] for name in observed}
    return az.from_dict(posterior, prior=prior or None, observed_data=observed or None, coords=coords, dims=dims)


def _first(values: Array) -> Array:
    """Values (T, n), without motion."""
    return values[:, 0] if values.ndim == 3 else values

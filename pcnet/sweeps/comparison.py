"""Bayesian model comparison by free action, an upper bound of −log evidence."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from pcnet.errors import StudyError
from pcnet.results.downsample import Array


class Average(NamedTuple):
    """Mean and standard deviation of a mixture of Gaussian beliefs."""

    mean: Array
    sd: Array


class Family(NamedTuple):
    """A family of models with its log evidence, posterior probability and number of models."""

    name: Hashable
    log_evidence: float
    probability: float
    models: int


def probabilities(free_actions: Array, prior: Array | None = None) -> Array:
    """Posterior model probabilities p(m | y) ∝ p(m) exp(−F_m), (models,); uniform prior by default, NaN excludes."""
    log_joint = np.where(np.isnan(free_actions), -np.inf, _log_prior(prior, len(free_actions)) - free_actions)
    if not np.isfinite(log_joint.max(initial=-np.inf)):
        raise StudyError("there is no model to compare: all of them diverged or have a prior probability of 0")
    weights: Array = np.exp(log_joint - log_joint.max())
    weights /= weights.sum()
    return weights


def families(free_actions: Array, names: Sequence[Hashable]) -> list[Family]:
    """Compare families of models, with equal prior probabilities of families and of models within a family.

    log p(y | family) = log mean exp(−F_m) over its models, so that large families have no advantage.
    """
    free_actions, members = np.asarray(free_actions, dtype=float), {}
    for name in dict.fromkeys(names):
        members[name] = free_actions[[each == name for each in names]]
    evidence = {name: _log_mean_exp(-own[~np.isnan(own)], len(own)) for name, own in members.items()}
    weights = probabilities(-np.array(list(evidence.values())))
    return [
        Family(name, evidence[name], float(weight), len(members[name]))
        for name, weight in zip(evidence, weights, strict=True)
    ]


def average(means: Array, sds: Array, weights: Array) -> Average:
    """Bayesian model average of Gaussian beliefs (models, …): the moments of their mixture."""
    weights = np.asarray(weights).reshape(-1, *(1,) * (means.ndim - 1))
    mean = (weights * means).sum(0)
    variance = (weights * (sds**2 + (means - mean) ** 2)).sum(0)
    return Average(mean, np.sqrt(variance))


def _log_mean_exp(values: Array, count: int) -> float:
    if not len(values):
        return -np.inf
    top = values.max()
    return float(top + np.log(np.exp(values - top).sum() / count))


def _log_prior(prior: Array | None, count: int) -> Array:
    if prior is None:
        return np.zeros(count)
    prior = np.asarray(prior, dtype=float)
    if prior.shape != (count,) or not (prior >= 0).all() or not 0 < prior.sum() < np.inf:
        raise StudyError(f"prior must be {count} finite numbers, one for each model, not negative and not all 0")
    with np.errstate(divide="ignore"):
        logs: Array = np.log(prior / prior.sum())
    return logs

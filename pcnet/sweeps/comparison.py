"""Bayesian model comparison: the free action bounds −log evidence, so that models of the same data can be weighed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pcnet.errors import StudyError

Array = NDArray[Any]


class Average(NamedTuple):
    """A mixture of Gaussian beliefs, by its mean and standard deviation."""

    mean: Array
    sd: Array


class Family(NamedTuple):
    """A family of models: its log evidence, its posterior probability and how many models it has."""

    name: Hashable
    log_evidence: float
    probability: float
    models: int


def probabilities(free_actions: Array, prior: Array | None = None) -> Array:
    """p(m | y) ∝ p(m) exp(−F_m); (models,). The prior is even unless given; NaN stands for a model that is out."""
    log_prior = np.zeros(len(free_actions)) if prior is None else _log_prior(prior, len(free_actions))
    log_joint = np.where(np.isnan(free_actions), -np.inf, log_prior - free_actions)
    if not np.isfinite(log_joint.max(initial=-np.inf)):
        raise StudyError("there is no model to compare: all of them diverged or have a prior probability of 0")
    weights: Array = np.exp(log_joint - log_joint.max())
    weights /= weights.sum()
    return weights


def families(free_actions: Array, names: Sequence[Hashable]) -> list[Family]:
    """Families weighed against each other, each as likely as the others beforehand, and so its models within it.

    log p(y | family) = log mean exp(−F_m) over its models, so that a family does not win by being large.
    """
    free_actions = np.asarray(free_actions, dtype=float)
    found = []
    for name in dict.fromkeys(names):
        own = free_actions[[each == name for each in names]]
        found.append((name, _log_mean_exp(-own[~np.isnan(own)], len(own)), len(own)))
    weights = probabilities(-np.array([evidence for _, evidence, _ in found]))
    return [
        Family(name, evidence, float(weight), count)
        for (name, evidence, count), weight in zip(found, weights, strict=True)
    ]


def average(means: Array, sds: Array, weights: Array) -> Average:
    """Bayesian model average of Gaussian beliefs (models, …): the mean and sd of their mixture."""
    weights = np.asarray(weights).reshape(-1, *(1,) * (means.ndim - 1))
    mean = (weights * means).sum(0)
    variance = (weights * (sds**2 + (means - mean) ** 2)).sum(0)
    return Average(mean, np.sqrt(variance))


def _log_mean_exp(values: Array, count: int) -> float:
    if not len(values):
        return -np.inf
    top = values.max()
    return float(top + np.log(np.exp(values - top).sum() / count))


def _log_prior(prior: Array, count: int) -> Array:
    prior = np.asarray(prior, dtype=float)
    if prior.shape != (count,) or not (prior >= 0).all() or not 0 < prior.sum() < np.inf:
        raise StudyError(f"a prior must be {count} finite numbers, one for each model, not negative and not all 0")
    with np.errstate(divide="ignore"):
        logs: Array = np.log(prior / prior.sum())
    return logs

"""Contestants of the arena, and what each is told."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import torch

from studies.arena import (
    cuthbert_rival,
    dynamax_rival,
    filterpy_rival,
    hgf_rival,
    ours,
    particles_rival,
)
from studies.arena.beliefs import Filter, filled
from studies.arena.model import Information
from studies.arena.tasks import Task

ALL: tuple[Information, ...] = ("everything", "noise", "parameters", "neither")
Contest = Literal["filter", "smoother"]
PATIENCE = 90.0  # CPU time after the first seed that pcnet gets, which is enough for all


def use_one_thread() -> None:
    """Let torch use one thread, and jax as well if it is not imported yet."""
    torch.set_num_threads(1)
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")


class Method(NamedTuple):
    """A filter or smoother of a package."""

    title: str
    package: str
    make: Callable[[Task, Information], Filter]
    told: tuple[Information, ...]
    entered: Callable[[Task], bool] = lambda _: True  # tasks that it is a filter of
    contest: Contest = "filter"
    seconds: float = 3.0  # CPU time after the first seed, after which a cell with three gets no further one
    levels_of: str | None = None  # the filter whose noise levels a smoother shares

    def missing(self) -> str | None:
        """Why the method cannot run here, or None."""
        if self.package == "pyhgf":
            return hgf_rival.missing()
        try:
            importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return f"{self.package} is not installed: make arena installs it"
        return None

    @property
    def is_ours(self) -> bool:
        return self.package == "pcnet"

    def build(self, task: Task, information: Information) -> Filter:
        """The filter; those of other packages get missing observations in long gaps."""
        found = self.make(task, information)
        return filled(found, task.system.dt) if task.system.irregular and not self.is_ours else found


def _smoothed(task: Task) -> bool:
    return task.family == "gaussian" and not task.switches and not task.peaks


def _smoother(
    title: str,
    package: str,
    make: Callable[[Task, Information], Filter],
    told: tuple[Information, ...] = ("everything", "neither"),
    levels_of: str | None = None,
) -> Method:
    seconds = PATIENCE if package == "pcnet" else Method._field_defaults["seconds"]
    return Method(title, package, make, told, _smoothed, "smoother", seconds, levels_of)


def _has_no_colour(task: Task) -> bool:
    """Whether noise is white; the weights of particles say nothing where all noise is part of the state."""
    return task.system.correlation_time is None


def _has_fixed_levels(task: Task) -> bool:
    """Whether the covariance of observations does not depend on the state, as the ensemble filter asks for."""
    return task.family != "poisson"


METHODS: Mapping[str, Method] = {
    "pcnet": Method("pcnet adaptive filter", "pcnet", ours.build_adaptive, ALL, seconds=PATIENCE),
    "dynamax-ekf": Method("dynamax EKF", "dynamax", partial(dynamax_rival.build, kind="extended"), ALL),
    "dynamax-ukf": Method("dynamax UKF", "dynamax", partial(dynamax_rival.build, kind="unscented"), ALL),
    "cuthbert": Method(
        "cuthbert EKF", "cuthbert", partial(cuthbert_rival.build, kind="extended"), ("everything", "noise")
    ),
    "cuthbert-ukf": Method(
        "cuthbert UKF", "cuthbert", partial(cuthbert_rival.build, kind="unscented"), ("everything", "noise")
    ),
    "cuthbert-enkf": Method(
        "cuthbert EnKF", "cuthbert", cuthbert_rival.build_ensemble, ("everything", "noise"), _has_fixed_levels
    ),
    "cuthbert-particles": Method(
        "cuthbert particles", "cuthbert", cuthbert_rival.build_particles, ("everything",), _has_no_colour
    ),
    "filterpy": Method(
        "filterpy UKF", "filterpy", filterpy_rival.build, ("everything", "noise", "neither"), seconds=2.0
    ),
    "filterpy-imm": Method(
        "filterpy IMM",
        "filterpy",
        filterpy_rival.build_switching,
        ("everything", "neither"),
        lambda task: task.switches,
    ),
    "particles": Method("particles", "particles", particles_rival.build, ("everything", "parameters"), _has_no_colour),
    "odem": Method("pcnet ODEM", "pcnet", ours.build_odem, ("neither",), lambda task: task.paper),
    "pyhgf": Method("pyhgf HGF", "pyhgf", hgf_rival.build, ("neither",), lambda task: task.family == "volatility"),
    "pcnet-smoother": _smoother("pcnet smoother", "pcnet", partial(ours.build_adaptive, smooth=True)),
    "dynamax-eks": _smoother(
        "dynamax EKS", "dynamax", partial(dynamax_rival.build, kind="extended", smooth=True), levels_of="dynamax-ekf"
    ),
    "dynamax-uks": _smoother(
        "dynamax UKS", "dynamax", partial(dynamax_rival.build, kind="unscented", smooth=True), levels_of="dynamax-ukf"
    ),
    "cuthbert-smoother": _smoother(
        "cuthbert EKS", "cuthbert", partial(cuthbert_rival.build, kind="extended", smooth=True), ("everything",)
    ),
    "cuthbert-uks": _smoother(
        "cuthbert UKS", "cuthbert", partial(cuthbert_rival.build, kind="unscented", smooth=True), ("everything",)
    ),
    "cuthbert-enks": _smoother(
        "cuthbert EnKS", "cuthbert", partial(cuthbert_rival.build_ensemble, smooth=True), ("everything",)
    ),
}
"""Methods by name."""

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
    seconds: float = 12.0  # CPU time after the first seed, after which a cell gets no further one

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


METHODS: Mapping[str, Method] = {
    "pcnet": Method("pcnet adaptive filter", "pcnet", ours.build_adaptive, ALL),
    "dynamax-ekf": Method("dynamax EKF", "dynamax", partial(dynamax_rival.build, kind="extended"), ALL),
    "dynamax-ukf": Method(
        "dynamax UKF", "dynamax", partial(dynamax_rival.build, kind="unscented"), ("everything", "noise", "neither")
    ),
    "cuthbert": Method("cuthbert EKF", "cuthbert", cuthbert_rival.build, ("everything", "noise")),
    "filterpy": Method(
        "filterpy UKF", "filterpy", filterpy_rival.build, ("everything", "noise", "neither"), seconds=7.0
    ),
    "filterpy-imm": Method(
        "filterpy IMM",
        "filterpy",
        filterpy_rival.build_switching,
        ("everything", "neither"),
        lambda task: task.switches,
    ),
    "particles": Method(
        "particles (1000)",
        "particles",
        particles_rival.build,
        ("everything",),
        lambda task: task.system.correlation_time is None,
    ),
    "odem": Method("pcnet ODEM", "pcnet", ours.build_odem, ("neither",), lambda task: task.paper),
    "pyhgf": Method("pyhgf HGF", "pyhgf", hgf_rival.build, ("neither",), lambda task: task.family == "volatility"),
    "pcnet-smoother": Method(
        "pcnet smoother",
        "pcnet",
        partial(ours.build_adaptive, smooth=True),
        ("everything", "neither"),
        _smoothed,
        "smoother",
    ),
    "dynamax-eks": Method(
        "dynamax EKS",
        "dynamax",
        partial(dynamax_rival.build, kind="extended", smooth=True),
        ("everything", "neither"),
        _smoothed,
        "smoother",
    ),
    "dynamax-uks": Method(
        "dynamax UKS",
        "dynamax",
        partial(dynamax_rival.build, kind="unscented", smooth=True),
        ("everything",),
        _smoothed,
        "smoother",
    ),
    "cuthbert-smoother": Method(
        "cuthbert EKS",
        "cuthbert",
        partial(cuthbert_rival.build, smooth=True),
        ("everything",),
        _smoothed,
        "smoother",
    ),
}
"""Methods by name."""

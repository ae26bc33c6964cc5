"""Contestants of the arena, and what each is told."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from studies.arena import cuthbert_rival, dynamax_rival, filterpy_rival, ours
from studies.arena.beliefs import Filter
from studies.arena.model import Information
from studies.arena.tasks import Task


def use_one_thread() -> None:
    """Let torch use one thread, and jax as well if it is not imported yet."""
    torch.set_num_threads(1)
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")


class Method(NamedTuple):
    """A filter of a package."""

    title: str
    package: str
    build: Callable[[Task, Information], Filter]
    told: tuple[Information, ...]
    entered: Callable[[Task], bool] = lambda _: True  # tasks that it is a filter of

    def missing(self) -> str | None:
        """Why the method cannot run here, or None."""
        try:
            importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return f"{self.package} is not installed: make arena installs it"
        return None

    @property
    def is_ours(self) -> bool:
        return self.package == "pcnet"


METHODS: Mapping[str, Method] = {
    "pcnet": Method(
        "pcnet adaptive filter", "pcnet", ours.build_adaptive, ("everything", "noise", "parameters", "neither")
    ),
    "dynamax-ekf": Method(
        "dynamax EKF",
        "dynamax",
        partial(dynamax_rival.build, kind="extended"),
        ("everything", "noise", "parameters", "neither"),
    ),
    "dynamax-ukf": Method(
        "dynamax UKF", "dynamax", partial(dynamax_rival.build, kind="unscented"), ("everything", "noise", "neither")
    ),
    "cuthbert": Method("cuthbert EKF", "cuthbert", cuthbert_rival.build, ("everything", "noise")),
    "filterpy": Method("filterpy UKF", "filterpy", filterpy_rival.build, ("everything", "noise", "neither")),
    "odem": Method("pcnet ODEM", "pcnet", ours.build_odem, ("neither",), lambda task: task.paper),
    "particles": Method(
        "particle filter (oracle)",
        "torch",
        ours.build_particles,
        ("everything",),
        lambda task: task.system.correlation_time is None,
    ),
}
"""Methods by name. The particle filter is the oracle: it is also told which observations are outliers."""

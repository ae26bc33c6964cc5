"""A cause drives a state."""

from __future__ import annotations

from typing import ClassVar

from pcnet.model.links.base import Link, LinkStyle
from pcnet.model.messages import PointPrediction, PredictionError


class Drives(Link[PointPrediction, PredictionError]):
    """The parent, a cause v, is an argument of the child's flow f(x, v, θ), and of its mappings g(x, v, θ)."""

    key: ClassVar[str] = "drives"
    style: ClassVar[LinkStyle] = LinkStyle(above=False, side="left", dash="-", label="cause")

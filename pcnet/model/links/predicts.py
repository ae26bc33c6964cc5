"""A state predicts a node below it, through a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pcnet.functions.closed_form import Identity
from pcnet.functions.traced import as_function
from pcnet.model.links.base import Link, LinkStyle
from pcnet.model.messages import GaussianPrediction, PointPrediction, PredictionError

if TYPE_CHECKING:
    from pcnet.functions.base import Function, PlainFunction
    from pcnet.model.node import AnyNode


class Predicts(Link[PointPrediction | GaussianPrediction, PredictionError]):
    """The parent predicts the child through a mapping g(x, θ), or g(x, v, θ) with causes; the identity unless given."""

    key: ClassVar[str] = "predicts"
    style: ClassVar[LinkStyle] = LinkStyle(above=True, side="left", dash="-", label="prediction")
    option_schema: ClassVar[Mapping[str, Any]] = {"via": {"$ref": "#/$defs/function"}}

    def __init__(self, parent: AnyNode, child: AnyNode, via: Function | PlainFunction | None = None) -> None:
        super().__init__(parent, child)
        shape = parent.error_shape
        self.via: Function = as_function(via, None if shape is None else shape.dim)

    @property
    def function(self) -> Function:
        return self.via

    @property
    def options(self) -> dict[str, Any]:
        return {} if isinstance(self.via, Identity) else {"via": self.via}

    def reversed(self) -> Predicts | None:
        return Predicts(self.child, self.parent, self.via)

    def describe(self) -> str:
        return f"{self.key} {self.child.name} via {self.via!r}"

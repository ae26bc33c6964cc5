"""A parameter node holds the parameters of a flow or mapping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pcnet.errors import GraphError
from pcnet.model.links.base import AnyLink, Link, LinkStyle
from pcnet.model.links.predicts import Predicts
from pcnet.model.messages import ParameterPrediction, ScoreError

if TYPE_CHECKING:
    from pcnet.model.node import AnyNode


class Parametrises(Link[ParameterPrediction, ScoreError]):
    """The parent holds the parameters of the child's flow or, with `of`, of the mapping by which it predicts `of`."""

    key: ClassVar[str] = "parametrises"
    style: ClassVar[LinkStyle] = LinkStyle(above=False, side="left", dash=":", label="parameters")
    option_schema: ClassVar[Mapping[str, Any]] = {"of": {"type": "string"}}

    def __init__(self, parent: AnyNode, child: AnyNode, of: AnyNode | None = None) -> None:
        super().__init__(parent, child)
        self._of = of

    @property
    def of(self) -> AnyNode | None:
        return self._of

    def check(self, links: Iterable[AnyLink]) -> None:
        links = list(links)
        mappings = [link for link in links if isinstance(link, Predicts) and link.parent is self.child]
        if self.of is not None and not any(link.child is self.of for link in mappings):
            raise GraphError(
                f"{self.child.name!r} does not predict {self.of.name!r}, so {self.parent.name!r} cannot parametrise "
                f"that mapping; add graph.predicts({self.child.name}, {self.of.name}, via=...) first"
            )
        super().check(links)

    def describe(self) -> str:
        of = "" if self.of is None else f"'s prediction of {self.of.name}"
        return f"{self.key} {self.child.name}{of}"

"""A precision node weighs the error of a node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from pcnet.errors import GraphError
from pcnet.model.links.base import AnyLink, Link, LinkStyle
from pcnet.model.messages import NoisePrediction, ScoreError


class Weighs(Link[NoisePrediction, ScoreError]):
    """The parent is the precision of the child's error, or of one of the noises that make it up."""

    key: ClassVar[str] = "weighs"
    style: ClassVar[LinkStyle] = LinkStyle(above=False, side="right", dash="--", label="precision")

    def check(self, links: Iterable[AnyLink]) -> None:
        links = list(links)
        super().check(links)
        others = [link.parent for link in links if isinstance(link, Weighs) and link.child is self.child]
        if others and not self.child.multiple_noises:
            other = others[-1].name
            raise GraphError(f"{self.child.name!r} already has the precision {other!r}; an error has exactly one")

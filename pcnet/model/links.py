"""Links between two nodes: their contract, and the kinds that come with pcnet."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar

from pcnet.errors import GraphError
from pcnet.functions.closed_form import Identity
from pcnet.functions.traced import as_function
from pcnet.model.messages import (
    GaussianPrediction,
    NoisePrediction,
    ParameterPrediction,
    PointPrediction,
    PredictionError,
    ScoreError,
)

if TYPE_CHECKING:
    from pcnet.functions.base import Function, PlainFunction
    from pcnet.model.node import AnyNode

P_co = TypeVar("P_co", covariant=True)
E_co = TypeVar("E_co", covariant=True)


class LinkStyle(NamedTuple):
    """How a link is drawn."""

    above: bool  # whether the parent is one level above the child; otherwise it stands beside it
    side: Literal["left", "right"]  # the side on which it stands
    dash: str  # line style of matplotlib
    label: str  # what the parent is to the child


class Link(ABC, Generic[P_co, E_co]):
    """A link: predictions of type P go from parent to child, errors of type E from child to parent.

    A subclass has a `key` (its name in files and summaries) and a `style`, and may refuse links in `check`. Options
    beyond parent and child are keyword arguments of its constructor, and attributes of the same names.
    """

    key: ClassVar[str]
    style: ClassVar[LinkStyle]
    option_schema: ClassVar[Mapping[str, Any]] = {}  # JSON schema of each option in files, by name
    kinds: ClassVar[dict[str, type[AnyLink]]] = {}  # all kinds of link by their keys
    function: Function | None = None  # the mapping of the link, if it has one
    of: AnyNode | None = None  # a third node that the link refers to, if it does

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Link.kinds[cls.key] = cls

    def __init__(self, parent: AnyNode, child: AnyNode) -> None:
        self.parent, self.child = parent, child

    @property
    def options(self) -> dict[str, Any]:
        """The options of this link by name, without those that are None."""
        return {name: value for name in self.option_schema if (value := getattr(self, name)) is not None}

    def check(self, links: Iterable[AnyLink]) -> None:
        """Raise `GraphError` if the link cannot be added to these links."""
        for other in links:
            if type(other) is type(self) and other.ends == self.ends:
                raise GraphError(f"{self.parent.name!r} already {self.key} {self.child.name!r}")

    def check_ends(self) -> bool:
        """Raise `GraphError` if one of its nodes does not accept the link."""
        self.child.check_as_child(self)
        self.parent.check_as_parent(self)
        return True

    @property
    def ends(self) -> tuple[AnyNode | None, ...]:
        """The nodes that the link joins."""
        return (self.parent, self.child, self.of)

    @property
    def names(self) -> tuple[str | None, ...]:
        """Names of `ends`."""
        return tuple(None if node is None else node.name for node in self.ends)

    def between(self, nodes: Mapping[str, AnyNode]) -> Self:
        """The same link between other nodes of the same names."""
        of = self.of
        options = {name: nodes[of.name] if of is not None and v is of else v for name, v in self.options.items()}
        return type(self)(nodes[self.parent.name], nodes[self.child.name], **options)

    def reversed(self) -> Self | None:
        """The link the other way round, if that has a meaning; for suggestions in errors."""
        return type(self)(self.child, self.parent) if not self.options else None

    def to_spec(self, describe: Callable[[Any], Any]) -> dict[str, Any]:
        """The options as plain data: nodes by name, functions by what `describe` makes of them."""
        of = self.of
        named = {name: of.name if of is not None and value is of else value for name, value in self.options.items()}
        return {name: value if isinstance(value, str) else describe(value) for name, value in named.items()}

    @classmethod
    def from_spec(cls, options: Mapping[str, Any], nodes: Mapping[str, AnyNode], find: Callable[[Any], Any]) -> Any:
        """Keyword arguments from plain data; find: turns the name of a function into it."""
        return {name: nodes[each] if name == "of" else find(each) for name, each in options.items()}

    def describe(self) -> str:
        """The link as one line of a summary, from the parent's side."""
        return f"{self.key} {self.child.name}"

    def __repr__(self) -> str:
        return f"{self.parent.name} {self.describe()}"


AnyLink = Link[Any, Any]  # a link of any kind


class Predicts(Link[PointPrediction | GaussianPrediction, PredictionError]):
    """The parent predicts the child through a mapping g(x, θ), or g(x, v, θ) with causes; the identity unless given."""

    key: ClassVar[str] = "predicts"
    style: ClassVar[LinkStyle] = LinkStyle(above=True, side="left", dash="-", label="prediction")
    option_schema: ClassVar[Mapping[str, Any]] = {"via": {"$ref": "#/$defs/function"}}
    function: Function

    def __init__(self, parent: AnyNode, child: AnyNode, via: Function | PlainFunction | None = None) -> None:
        super().__init__(parent, child)
        shape = parent.error_shape
        self.via = self.function = as_function(via, None if shape is None else shape.dim)

    @property
    def options(self) -> dict[str, Any]:
        return {} if isinstance(self.via, Identity) else {"via": self.via}

    def reversed(self) -> Predicts | None:
        return Predicts(self.child, self.parent, self.via)

    def describe(self) -> str:
        return f"{self.key} {self.child.name} via {self.via!r}"


class Drives(Link[PointPrediction, PredictionError]):
    """The parent, a cause v, is an argument of the child's flow f(x, v, θ), and of its mappings g(x, v, θ).

    Categories that drive a switching state send a `CategoryPrediction`, and receive a `CategoryPosterior`.
    """

    key: ClassVar[str] = "drives"
    style: ClassVar[LinkStyle] = LinkStyle(above=False, side="left", dash="-", label="cause")


class Parametrises(Link[ParameterPrediction, ScoreError]):
    """The parent holds the parameters of the child's flow or, with `of`, of the mapping by which it predicts `of`."""

    key: ClassVar[str] = "parametrises"
    style: ClassVar[LinkStyle] = LinkStyle(above=False, side="left", dash=":", label="parameters")
    option_schema: ClassVar[Mapping[str, Any]] = {"of": {"type": "string"}}

    def __init__(self, parent: AnyNode, child: AnyNode, of: AnyNode | None = None) -> None:
        super().__init__(parent, child)
        self.of = of

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

"""The two kinds of message: predictions go down the edges, precision-weighted errors come back up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

T_co = TypeVar("T_co", covariant=True)


class Prediction(Generic[T_co]):
    """What a node expects of the node below it: a tensor, or the expected `Precision` of its error."""

    __slots__ = ("_value",)

    def __init__(self, value: T_co) -> None:
        self._value = value

    @property
    def value(self) -> T_co:
        return self._value

    def __repr__(self) -> str:
        return f"Prediction({self._value!r})"


class Error(Generic[T_co]):
    """How wrong a prediction p was, in the units of p.

    With E the sender's energy: weighted = −∂E/∂p, precision ≈ ∂²E/∂p² (never indefinite), and
    precision + remainder = ∂²E/∂p² exactly; a remainder of None is zero. The curvatures may be given as
    functions: they are computed when somebody asks, and once.

    A sender that moves by an implicit step can say what will be left of its error once it has moved in answer
    (`eliminated`, again a function): then a parent that asks for that takes a step with it, not before it.
    """

    __slots__ = ("_eliminated", "_precision", "_remainder", "_weighted")

    def __init__(
        self,
        weighted: Tensor,
        precision: T_co | Callable[[], T_co],
        remainder: Tensor | Callable[[], Tensor | None] | None = None,
        eliminated: Callable[[], Error[Any]] | None = None,
    ) -> None:
        self._weighted = weighted
        self._precision = precision
        self._remainder = remainder
        self._eliminated: Callable[[], Error[Any]] | Error[Any] | None = eliminated

    @property
    def weighted(self) -> Tensor:
        return self._weighted

    @property
    def precision(self) -> T_co:
        if callable(self._precision):
            self._precision = self._precision()
        return self._precision

    @property
    def remainder(self) -> Tensor | None:
        if callable(self._remainder):
            self._remainder = self._remainder()
        return self._remainder

    @property
    def eliminated(self) -> Error[Any]:
        """The error once its sender has answered; the error as it is, if the sender does not."""
        if self._eliminated is None:
            return self
        if not isinstance(self._eliminated, Error):
            self._eliminated = self._eliminated()
        return self._eliminated

    def __repr__(self) -> str:
        return f"Error({self._weighted!r})"

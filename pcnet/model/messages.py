"""The two kinds of message: predictions go down the edges, precision-weighted errors come back up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from pcnet.numerics.coloured_noise import Noise
from pcnet.numerics.kalman import PredictiveDistribution
from pcnet.numerics.kernels import Kernel

T_co = TypeVar("T_co", covariant=True)


class ParameterTransition(NamedTuple):
    """How a belief about parameters θ passed into one about θ⁺, the number-th time (B,); its mean (B, p) was this.

    Given θ⁺, θ is mean + kept (θ⁺ − η⁺) with covariance `lost`; (B, p, p) each. For parameters that stand still θ⁺ is
    θ.
    """

    number: Tensor
    mean: Tensor
    kept: Tensor
    lost: Tensor


class Prediction(Generic[T_co]):
    """What a node expects of the node below it: a tensor, or the expected `Precision` of its error.

    How sure the sender is of it, if it says so: the covariance (B, n, n) of the value, or of log-precisions. For
    neighbours
    that carry beliefs through time also: all that is `expected` of an observation, and the covariance `between` it and
    what had been expected of the one before; how a belief was handed over; or which noise a precision is that of. A
    precision also says the autocorrelation of the noise.
    """

    __slots__ = ("_between", "_covariance", "_expected", "_handover", "_kernel", "_noise", "_value")

    def __init__(
        self,
        value: T_co,
        covariance: Callable[[], Tensor] | None = None,
        expected: PredictiveDistribution | None = None,
        between: Tensor | None = None,
        handover: ParameterTransition | None = None,
        noise: Noise | None = None,
        kernel: Kernel | None = None,
    ) -> None:
        self._value = value
        self._kernel = kernel
        self._covariance: Callable[[], Tensor] | Tensor | None = covariance
        self._expected = expected
        self._between = between
        self._handover = handover
        self._noise = noise

    @property
    def value(self) -> T_co:
        return self._value

    @property
    def covariance(self) -> Tensor | None:
        if callable(self._covariance):
            self._covariance = self._covariance()
        return self._covariance

    @property
    def expected(self) -> PredictiveDistribution | None:
        return self._expected

    @property
    def between(self) -> Tensor | None:
        return self._between

    @property
    def handover(self) -> ParameterTransition | None:
        return self._handover

    @property
    def noise(self) -> Noise | None:
        return self._noise

    @property
    def kernel(self) -> Kernel | None:
        return self._kernel

    def __repr__(self) -> str:
        return f"Prediction({self._value!r})"


class Error(Generic[T_co]):
    """How wrong a prediction p was, in the units of p.

    With E the sender's energy: weighted = −∂E/∂p, precision ≈ ∂²E/∂p² (never indefinite), and
    precision + remainder = ∂²E/∂p² exactly; a remainder of None is zero. The curvatures may be given as
    functions: they are computed when somebody asks, and once.

    A sender that moves by an implicit step can say what will be left of its error once it has moved in answer
    (`eliminated`, again a function): then a parent that asks for that takes a step with it, not before it.

    noise: that of the sender alone, where `precision` is that of an error with the parent's uncertainty in it.
    """

    __slots__ = ("_eliminated", "_noise", "_precision", "_remainder", "_weighted")

    def __init__(
        self,
        weighted: Tensor,
        precision: T_co | Callable[[], T_co],
        remainder: Tensor | Callable[[], Tensor | None] | None = None,
        eliminated: Callable[[], Error[Any]] | None = None,
        noise: Noise | None = None,
    ) -> None:
        self._weighted = weighted
        self._precision = precision
        self._remainder = remainder
        self._noise = noise
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

    @property
    def noise(self) -> Noise | None:
        return self._noise

    def __repr__(self) -> str:
        return f"Error({self._weighted!r})"

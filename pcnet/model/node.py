"""The contract that every kind of node implements."""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.model.context import B, Neighbours, NodeContext, S
from pcnet.model.links import AnyLink
from pcnet.numerics.coloured_noise import NoiseSpec
from pcnet.numerics.estimators import ParameterEstimator
from pcnet.settings import at_least_1d, batch_shape_of, settings

Indefinite = Literal["clamp", "raise"]
"""Where a curvature is not positive definite: clamp its eigenvalues and count it, or treat it as divergence."""
INDEFINITE = "its curvature is not positive definite; use indefinite='clamp' or curvature='gauss-newton'"
T = TypeVar("T")


class ErrorShape(NamedTuple):
    """Shape of an error."""

    rows: int  # orders
    dim: int  # channels


class Energy(NamedTuple):
    """A node's contribution to the free energy F = complexity − accuracy; (B,) each, None for none."""

    accuracy: Tensor | None = None
    complexity: Tensor | None = None

    @property
    def free(self) -> Tensor | None:
        """F, (B,)."""
        if self.accuracy is None:
            return self.complexity
        return -self.accuracy if self.complexity is None else self.complexity - self.accuracy


class Prior(NamedTuple):
    """The Gaussian belief that a run starts with."""

    mean: Tensor  # (B, n)
    sd: Tensor  # (B, n)


class BatchSpec(NamedTuple):
    """Batch size, dtype and device of a run. Within a run every tensor has exactly one leading batch dimension.

    element: the one batch element that is meant, of a batch with this shape; all unless given.
    """

    batch: int
    dtype: torch.dtype
    device: torch.device
    batch_shape: torch.Size
    element: int | None = None

    def of_element(self, element: int) -> BatchSpec:
        """The same batch, of which only one element is run."""
        return self._replace(batch=1, element=element)

    def expand(self, value: Tensor, own: int) -> Tensor:
        """A setting with `own` trailing dimensions, once for each batch element: (B, *own)."""
        value = value.to(dtype=self.dtype, device=self.device)
        inner = value.shape[value.dim() - own :]
        if value.dim() > own:
            value = value.expand(self.batch_shape + inner).reshape(-1, *inner)
            value = value if self.element is None else value[self.element : self.element + 1]
        return value.expand(self.batch, *inner).contiguous()

    def expand_vector(self, value: Tensor, n: int) -> Tensor:
        """A setting of one number or (..., n) as (B, n)."""
        value = at_least_1d(value)
        return self.expand(value.expand(*value.shape[:-1], n), 1)

    def expand_to_batch(self, part: T) -> T:
        """A copy of an integrator, estimator or kernel with settings that are single numbers or (B,)."""
        copied = copy.copy(part)
        fields: tuple[Any, ...] = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
        for field, value in ((each.name, getattr(part, each.name)) for each in fields):
            if isinstance(value, Tensor):
                flat = self.expand(value, 0) if value.dim() else value.to(dtype=self.dtype, device=self.device)
                object.__setattr__(copied, field, flat)
            elif dataclasses.is_dataclass(value):
                object.__setattr__(copied, field, self.expand_to_batch(value))
        return copied

    def zeros(self, *shape: int) -> Tensor:
        """Zeros, (B, *shape)."""
        return torch.zeros(self.batch, *shape, dtype=self.dtype, device=self.device)

    def eye(self, n: int) -> Tensor:
        """Identity matrices, (B, n, n)."""
        return torch.eye(n, dtype=self.dtype, device=self.device).repeat(self.batch, 1, 1)


class Recordable(NamedTuple):
    """A quantity of a node that a run can record, (B, *dims).

    raw reads the quantity itself or, with `transform`, the tensor that it is computed from, which must not change.
    """

    dims: tuple[str, ...]  # names of its dimensions
    raw: Callable[[NodeContext[Any, Any]], Tensor]
    transform: Callable[[Tensor], Tensor] | None = None  # the quantity from raw values of many ticks, as one batch

    def read(self, ctx: NodeContext[Any, Any]) -> Tensor:
        """The present value, (B, *dims)."""
        value = self.raw(ctx)
        return value if self.transform is None else self.transform(value)


@settings
class Node(ABC, Generic[S, B]):
    """A belief with a local energy, updated by scheduled actions, that exchanges messages with its neighbours only.

    A node is immutable settings plus pure rules. S is the type of its state, a named tuple of tensors (B, ...) or of
    further such tuples. B is the type of what `bind` returns: constants of a run. To add a kind of node, subclass this
    or a shipped kind.
    """

    name: str
    role: ClassVar[str]  # the role by which schedules address nodes of this kind
    kind: ClassVar[str]  # the kind in summaries and drawings
    observes: ClassVar[bool] = False  # whether a run must provide observations for it
    is_input: ClassVar[bool] = False  # whether what it observes is known, and no evidence about the states
    takes_low_rank: ClassVar[bool] = False  # whether it accepts a `LowRankDistribution` of many channels
    sends_covariance: ClassVar[bool] = False  # whether its predictions are `GaussianPrediction`s
    switches: ClassVar[bool] = False  # whether categories may drive it
    joins_causes: ClassVar[bool] = False  # whether a `KalmanCauseNode` may drive it
    joins_child: ClassVar[bool] = False  # whether its belief is part of that of the state that it drives
    joins_parameters: ClassVar[bool] = False  # whether it can carry its parameters in its own belief
    multiple_noises: ClassVar[bool] = False  # whether several precision nodes may weigh it, each for its own noise
    required_actions: ClassVar[tuple[str, ...]] = ()  # actions that a schedule must contain for it
    parent_of: ClassVar[tuple[type[AnyLink], ...]] = ()  # kinds of link that it may be the parent of
    child_of: ClassVar[tuple[type[AnyLink], ...]] = ()  # kinds of link that it may be the child of
    private_fields: ClassVar[frozenset[str]] = frozenset()  # fields of the state on which no message depends

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable() or "/" in self.name:
            raise SettingError(f"{type(self).__name__}: a name must be printable text without /, not {self.name!r}")

    def check_as_parent(self, link: AnyLink) -> None:
        """Raise `GraphError` if this node cannot be the parent of a link."""
        shapeless = link.function is not None and link.child.error_shape is None
        if shapeless or not isinstance(link, self.parent_of):
            raise GraphError(f"{self.title} cannot be the parent in {self.name!r} {link.key} {link.child.name!r}")

    def check_as_child(self, link: AnyLink) -> None:
        """Raise `GraphError` if this node cannot be the child of a link."""
        if not isinstance(link, self.child_of):
            raise GraphError(f"{self.title} cannot be the child in {link.parent.name!r} {link.key} {self.name!r}")

    def depends_on_time(self, links: Neighbours) -> bool:
        """Whether a function of the node depends on the time."""
        return False

    def check(self, links: Neighbours, like: Tensor) -> None:
        """Raise `GraphError` if the node cannot run with these links; `like` has the dtype and device of the run."""

    def __repr__(self) -> str:
        return f"<{self.title}: {self.describe()}>"

    @property
    def title(self) -> str:
        return f"{type(self).__name__} {self.name!r}"

    @property
    def error_shape(self) -> ErrorShape | None:
        """Shape of the node's own error, if it has one."""
        return None

    @property
    def shape(self) -> ErrorShape:
        """`error_shape` of a node that has one."""
        assert self.error_shape is not None
        return self.error_shape

    @property
    def is_interpolated(self) -> bool:
        """Whether a known input is a straight line between observations; otherwise it holds."""
        return False

    @property
    def observation_size(self) -> int:
        """Number of values of an observation."""
        return self.error_shape.dim if self.error_shape is not None else 0

    @property
    def n_parameters(self) -> int:
        """Number of parameters that the node provides to a function."""
        return 0

    @property
    def batch_shape(self) -> torch.Size:
        """Batch dimensions of the settings."""
        return batch_shape_of(self)

    @property
    def sampling_interval(self) -> Tensor | None:
        """Time between two observations, if the node observes."""
        return None

    @property
    def data(self) -> Mapping[str, Any]:
        """How observations are preprocessed. Free energies of differently preprocessed data cannot be compared."""
        shape = self.error_shape
        return {} if shape is None else {"orders": shape.rows, "channels": shape.dim}

    def describe(self) -> str:
        """A few words for the summary of the graph."""
        return ""

    def default_estimator(self, link: AnyLink, above: tuple[AnyLink, ...]) -> ParameterEstimator | None:
        """The estimator for a parameter or precision node at a link above that has none; None for the paper's."""
        return None

    def joins_belief(self, below: tuple[AnyLink, ...]) -> bool:
        """Whether the node, as a parameter of nodes below, is part of the belief of a state there."""
        return False

    def noise_spec(self, above: tuple[AnyLink, ...], spec: BatchSpec) -> NoiseSpec | None:
        """The noise behind the node's own error, as a state above would carry it; None if it cannot."""
        return None

    @abstractmethod
    def bind(self, links: Neighbours, spec: BatchSpec) -> B:
        """Constants of a run: everything that depends on settings, links and batch alone."""

    @abstractmethod
    def init(self, bound: B, spec: BatchSpec) -> S:
        """The state before the first observation."""

    def prior_belief(self, bound: B) -> Prior | None:
        """The belief before the first observation, if it is part of the settings."""
        return None

    def prediction(self, ctx: NodeContext[S, B], link: AnyLink) -> Any:
        """The prediction to send down a link."""
        raise GraphError(f"{self.title} sends no predictions")

    def error(self, ctx: NodeContext[S, B], link: AnyLink) -> Any:
        """The error to send up a link."""
        raise GraphError(f"{self.title} sends no errors")

    @abstractmethod
    def energy(self, ctx: NodeContext[S, B]) -> Energy:
        """The node's contribution to the free energy."""

    @property
    @abstractmethod
    def quantities(self) -> Mapping[str, Recordable]:
        """What can be recorded of the node, by name."""

    def gradient(self, ctx: NodeContext[S, B]) -> Tensor | None:
        """Gradient of the free energy with respect to the mean of the belief, (B, n), if the node uses it."""
        return None

    def hessian(self, ctx: NodeContext[S, B]) -> Tensor | None:
        """Its curvature (B, n, n), exact or Gauss–Newton as the settings say."""
        return None

    def fallbacks(self, ctx: NodeContext[S, B]) -> Tensor | None:
        """How often a named fallback was used, (B,); None if there is none."""
        return None

    # --- actions: each returns the new state; a node ignores actions that it does not implement -------------------
    def observe(self, ctx: NodeContext[S, B]) -> S:
        """Take in the observation."""
        return ctx.state

    def initialise(self, ctx: NodeContext[S, B]) -> S:
        """Find a first belief from the first observation."""
        return ctx.state

    def predict(self, ctx: NodeContext[S, B]) -> S:
        """Time update: move the belief to the time of the observation."""
        return ctx.state

    def update(self, ctx: NodeContext[S, B]) -> S:
        """Update the belief by the errors from below."""
        return ctx.state

    def accumulate(self, ctx: NodeContext[S, B]) -> S:
        """Add the present errors to what the next update uses."""
        return ctx.state

    def update_covariance(self, ctx: NodeContext[S, B]) -> S:
        """Update the covariance of the belief."""
        return ctx.state

    def retune(self, ctx: NodeContext[S, B]) -> S:
        """Correct the belief for parameters and noise levels that have changed."""
        return ctx.state

    def renew_prior(self, ctx: NodeContext[S, B]) -> S:
        """Make the posterior the prior of the next window."""
        return ctx.state


AnyNode = Node[Any, Any]  # a node of any kind

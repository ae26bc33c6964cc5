"""The contract every node kind implements, and the little world a node sees while it acts.

A node is settings plus pure rules. What changes during a run (belief, memory, messages) lives in its `Local`, which
holds the node's own links and nothing else: locality is not a habit but all there is to reach.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from pcnet.engine.clock import Clock
from pcnet.errors import GraphError, SettingError
from pcnet.functions.base import Function
from pcnet.model.messages import Error, Prediction
from pcnet.settings import batch_shape_of, settings

Kind = Literal["predicts", "drives", "parametrises", "weighs"]
Indefinite = Literal["clamp", "raise"]
"""Where a curvature is not positive definite: clamp its eigenvalues and count it, or count it as divergence."""
P = TypeVar("P")
R = TypeVar("R")


INDEFINITE = "its curvature is not positive definite; use indefinite='clamp' or curvature='gauss-newton'"


class Link:
    """An edge of the graph. Predictions go from parent to child, errors from child to parent."""

    __slots__ = ("child", "function", "kind", "of", "parent")

    def __init__(self, kind: Kind, parent: Node, child: Node, function: Function | None, of: Node | None) -> None:
        self.kind = kind
        self.parent = parent
        self.child = child
        self.function = function
        """The mapping of a `predicts` link."""
        self.of = of
        """For `parametrises`: the node whose prediction is parametrised, or None for the child's own flow."""

    def __repr__(self) -> str:
        of = f" → {self.of.name}" if self.of is not None else ""
        return f"{self.parent.name} {self.kind} {self.child.name}{of}"


class ErrorShape(NamedTuple):
    """Rows (orders) and channels of the error that a precision node weighs."""

    rows: int
    dim: int


class Energy(NamedTuple):
    """A node's share of the free energy, F = complexity − accuracy; (B,) each, None where it has none."""

    accuracy: Tensor | None = None
    complexity: Tensor | None = None

    @property
    def free(self) -> Tensor | None:
        """F, (B,)."""
        if self.accuracy is None:
            return self.complexity
        return -self.accuracy if self.complexity is None else self.complexity - self.accuracy


class BatchSpec(NamedTuple):
    """What a run is begun with."""

    batch: int
    dtype: torch.dtype
    device: torch.device
    batch_shape: torch.Size

    def fill(self, value: Tensor, own: int) -> Tensor:
        """A setting with `own` trailing dimensions of its own, one copy a batch element: (B, *own)."""
        value = value.to(dtype=self.dtype, device=self.device)
        inner = value.shape[value.dim() - own :]
        if value.dim() > own:
            value = value.expand(self.batch_shape + inner).reshape(self.batch, *inner)
        return value.expand(self.batch, *inner).contiguous()

    def lay_out(self, part: P) -> P:
        """A copy of a part (a mover, a kernel) whose settings are single numbers or one for each batch element."""
        copied = copy.copy(part)
        fields: tuple[Any, ...] = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
        for field, value in ((each.name, getattr(part, each.name)) for each in fields):
            if isinstance(value, Tensor):
                flat = self.fill(value, 0) if value.dim() else value.to(dtype=self.dtype, device=self.device)
                object.__setattr__(copied, field, flat)
            elif dataclasses.is_dataclass(value):
                object.__setattr__(copied, field, self.lay_out(value))
        return copied


class Recordable(NamedTuple):
    """Something of a node that a run can record, (B, *dims): the names of its dimensions and how to read it.

    raw: the quantity itself or, with `transform`, the value it is computed from, which must not be modified afterwards.
    transform: applied to the raw values of many ticks at once, as if they were one batch.
    """

    dims: tuple[str, ...]
    raw: Callable[[NodeContext], Tensor]
    transform: Callable[[Tensor], Tensor] | None = None

    def read(self, local: NodeContext) -> Tensor:
        """What it is now, (B, *dims)."""
        value = self.raw(local)
        return value if self.transform is None else self.transform(value)


class ForecastStart(NamedTuple):
    """What a node believes of numbers of its own that have a part in what is to come: (B, n) and (B, n, n)."""

    mean: Tensor
    covariance: Tensor


class ForecastContext(NamedTuple):
    """A moment to come, as a node would find it: its own numbers (B, n), its noise (B, dim), what it hears from above.

    There may be several copies of each batch element, copy by copy.
    """

    own: Tensor
    noise: Tensor
    heard: Mapping[Link, Tensor]

    def of(self, kind: Kind) -> list[Tensor]:
        """All that is heard along links of a kind."""
        return [value for link, value in self.heard.items() if link.kind == kind]

    def spread(self, value: Tensor) -> Tensor:
        """What is so now (b, ...), as it is in all copies."""
        return value.repeat(len(self.own) // len(value), *(1,) * (value.dim() - 1))


class ForecastStep(NamedTuple):
    """Mean (B, dim) and covariance (B, dim, dim) of a state that is to come, and the same of the nodes below, by name.

    Those of what would be observed, with its noise.
    """

    mean: Tensor
    covariance: Tensor
    below: Mapping[str, tuple[Tensor, Tensor]]


class Failure(NamedTuple):
    """Which batch elements (B,) a node cannot go on with, and why."""

    where: Tensor
    why: str


class NodeContext:
    """What one node sees during a run: its belief, its memory, its observation and the messages on its own links.

    Messages depend on beliefs; memory (accumulators, histories) is the node's alone. While `mask` is set, changes
    reach only those batch elements.
    """

    __slots__ = (
        "_belief",
        "_below_by_kind",
        "_by_kind",
        "_inbox",
        "_memo",
        "_memory",
        "_notify",
        "above",
        "below",
        "clock",
        "mask",
        "observation",
        "rule",
        "trouble",
    )

    def __init__(self) -> None:
        self.above: tuple[Link, ...] = ()
        self.below: tuple[Link, ...] = ()
        self.mask: Tensor | None = None
        self.observation: Tensor | None = None
        self.clock: Clock
        self.rule: Any = None
        """How the node moves, laid out for this run."""
        self.trouble: Failure | None = None
        """What `fail` said, until the run has dealt with it."""
        self._belief: Any = None
        self._memory: Any = None
        self._by_kind: dict[tuple[Kind, Node | None], tuple[Link, ...]] = {}
        self._below_by_kind: dict[Kind, tuple[Link, ...]] = {}
        self._memo: dict[str, tuple[tuple[Any, ...], Any]] = {}
        self._inbox: Mapping[Link, Callable[[], Any]] = {}
        self._notify: Callable[[], None] = lambda: None

    def attach(self, inbox: Mapping[Link, Callable[[], Any]], notify: Callable[[], None]) -> None:
        """Connect to the neighbours: where their messages come from, and whom to tell when the belief changes."""
        self._inbox, self._notify = inbox, notify

    @property
    def belief(self) -> Any:
        return self._belief

    @belief.setter
    def belief(self, belief: Any) -> None:
        self._belief = belief if self.mask is None else merge(self.mask, belief, self._belief)
        self._notify()

    @property
    def memory(self) -> Any:
        return self._memory

    @memory.setter
    def memory(self, memory: Any) -> None:
        self._memory = memory if self.mask is None else merge(self.mask, memory, self._memory)

    @property
    def elapsed(self) -> Tensor:
        """The time since the previous observation (B,); at the first one, the sampling interval."""
        return self.clock.elapsed

    @property
    def pace(self) -> Tensor | None:
        """`elapsed` over the sampling interval (B,), where observations do not come at that interval."""
        return self.clock.pace

    @property
    def time(self) -> Tensor:
        """The time now (B,), from one sampling interval before the first observation on."""
        return self.clock.now

    def prediction(self, link: Link) -> Any:
        """The value predicted by the node at the other end of a link above."""
        return self.message(link).value

    def message(self, link: Link) -> Prediction[Any]:
        """All that came down a link above: the value predicted, and how sure the sender is of it."""
        message: Prediction[Any] = self._inbox[link]()
        return message

    def error(self, link: Link) -> Error[Any]:
        """The error that came back along a link below."""
        message: Error[Any] = self._inbox[link]()
        return message

    def fail(self, where: Tensor, why: str) -> None:
        """Say that batch elements (B,) cannot go on; what the node does to them then is of no consequence."""
        concerned = where if self.mask is None else where & self.mask
        if bool(concerned.any()):
            self.trouble = Failure(concerned, why)

    def links_above(self, kind: Kind, of: Node | None = None) -> tuple[Link, ...]:
        """The links above of one kind; for `parametrises`, those of the flow or of the mapping to `of`."""
        found = self._by_kind.get((kind, of))
        if found is None:
            found = self._by_kind[kind, of] = tuple(k for k in self.above if k.kind == kind and k.of is of)
        return found

    def links_below(self, kind: Kind) -> tuple[Link, ...]:
        """The links below of one kind."""
        found = self._below_by_kind.get(kind)
        if found is None:
            found = self._below_by_kind[kind] = tuple(k for k in self.below if k.kind == kind)
        return found

    def once(self, name: str, compute: Callable[[], R], *inputs: Any) -> R:
        """compute(), kept for as long as its inputs are the very same objects."""
        kept = self._memo.get(name)
        if kept is not None and len(kept[0]) == len(inputs) and all(map(operator.is_, kept[0], inputs)):
            return kept[1]  # type: ignore[no-any-return]
        result = compute()
        self._memo[name] = (inputs, result)
        return result


def merge(mask: Tensor, new: Any, old: Any) -> Any:
    """`new` where the mask (B,) holds and `old` elsewhere, field by field of a named tuple of tensors.

    Where one of them has not found its size yet, it is filled with 0 to that of the other.
    """
    fields = []
    for fresh, kept in zip(new, old, strict=True):
        shaped = mask.view(-1, *(1,) * (fresh.dim() - 1))
        if fresh.shape == kept.shape:
            fields.append(fresh if fresh is kept else torch.where(shaped, fresh, kept))
        else:
            fields.append(torch.where(shaped, _filled(fresh, kept), _filled(kept, fresh)))
    return type(new)(*fields)


def _filled(value: Tensor, other: Tensor) -> Tensor:
    """A tensor with zeros at the ends of its dimensions, to the size of another where that is larger."""
    lacking = [max(0, theirs - mine) for mine, theirs in zip(value.shape, other.shape, strict=True)]
    return torch.constant_pad_nd(value, [amount for lack in reversed(lacking) for amount in (0, lack)])


@settings
class Node(ABC):
    """A belief with a local energy, woken by a clock, that talks to its neighbours only.

    To add a kind of node, subclass this (or a shipped kind) and implement what it does; the machinery needs no change.
    Within a run every tensor has exactly one leading batch dimension.
    """

    name: str
    role: ClassVar[str]
    """What schedules call nodes of this kind."""
    observes: ClassVar[bool] = False
    """Whether a run has to bring observations."""
    sure: ClassVar[bool] = False
    """Whether its predictions say all that is `expected`, with how sure it is of it."""
    multiple_noises: ClassVar[bool] = False
    """Whether more than one precision node may weigh it, each a noise of its own."""
    required_actions: ClassVar[tuple[str, ...]] = ()
    """What a schedule must ask it to do, or its belief would mean nothing."""

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable() or "/" in self.name:
            raise SettingError(f"{type(self).__name__}: a name must be printable text without /, not {self.name!r}")

    # --- composing ---------------------------------------------------------------------------------------------
    def as_parent(self, link: Link) -> None:
        """Refuse a link from this node to a child that makes no sense."""
        raise GraphError(f"{self.title} cannot be the one that {link.kind} {link.child.name!r}")

    def as_child(self, link: Link) -> None:
        """Refuse a link from a parent to this node that makes no sense."""
        raise GraphError(f"{self.title} cannot be the one that {link.parent.name!r} {link.kind}")

    def check(self, above: tuple[Link, ...], below: tuple[Link, ...], like: Tensor) -> None:
        """Refuse to run with these links, in words that say what is missing; `like` has the run's dtype and device."""

    def __repr__(self) -> str:
        return f"<{self.title}: {self.describe()}>"

    @property
    def title(self) -> str:
        return f"{type(self).__name__} {self.name!r}"

    @property
    def error_shape(self) -> ErrorShape | None:
        """The shape of this node's error, if it has one that can be weighed."""
        return None

    @property
    def observed_width(self) -> int:
        """How many numbers an observation of this node has."""
        return self.error_shape.dim if self.error_shape is not None else 0

    @property
    def width(self) -> int:
        """How many parameters this node brings to a function that it parametrises."""
        return 0

    @property
    def batch_shape(self) -> torch.Size:
        """The batch dimensions of this node's settings."""
        return batch_shape_of(self)

    @property
    def sampling_interval(self) -> Tensor | None:
        """The time between two observations, if this node observes."""
        return None

    @property
    def data(self) -> Mapping[str, Any]:
        """What becomes of an observation here: free energies of different data cannot be compared."""
        shape = self.error_shape
        return {} if shape is None else {"orders": shape.rows, "channels": shape.dim}

    def check_passes(self, above: tuple[Link, ...]) -> None:
        """Refuse to step after a whole pass over recorded data, in words that say why."""
        raise GraphError(f"{self.title} cannot step after a pass; let it act at every observation")

    def describe(self) -> str:
        """A few words for the graph's summary."""
        return ""

    # --- running -----------------------------------------------------------------------------------------------
    @abstractmethod
    def begin(self, local: NodeContext, start: BatchSpec) -> None:
        """Set the belief and memory that a run starts with."""

    def warm_start(self, local: NodeContext, belief: Any) -> None:
        """Once begun: believe what another pass over the same observations has led to. The prior is as it was."""
        local.belief = belief

    def prediction(self, local: NodeContext, link: Link) -> Prediction[Any]:
        """The prediction to send down a link, from the belief and what came from above."""
        raise GraphError(f"{self.title} sends no predictions")

    def error(self, local: NodeContext, link: Link) -> Error[Any]:
        """The error to send up a link, from the belief and the messages on the node's links."""
        raise GraphError(f"{self.title} sends no errors")

    @abstractmethod
    def energy(self, local: NodeContext) -> Energy:
        """This node's share of the free energy."""

    def gradient(self, local: NodeContext) -> Tensor | None:
        """The gradient of the free energy in the mean of the belief (B, n), put together from local messages."""
        return None

    def hessian(self, local: NodeContext) -> Tensor | None:
        """Its curvature (B, n, n), exact or approximate as the node's settings say."""
        return None

    @property
    @abstractmethod
    def quantities(self) -> Mapping[str, Recordable]:
        """What can be recorded of this node."""

    # --- acting: what a schedule can ask for; a node does nothing unless it says otherwise --------------------------
    def observe(self, local: NodeContext) -> None:
        """Take in the observation."""

    def initialise(self, local: NodeContext) -> None:
        """Find a first belief from the first observation."""

    def update(self, local: NodeContext) -> None:
        """Revise the mean of the belief."""

    def accumulate(self, local: NodeContext) -> None:
        """Add what the errors say now to what a later move will use."""

    def update_covariance(self, local: NodeContext) -> None:
        """Revise the uncertainty of the belief."""

    def predict(self, local: NodeContext) -> None:
        """Time update: move the belief to the present."""

    def retune(self, local: NodeContext) -> None:
        """Follow parameters and precisions that have changed."""

    def renew_prior(self, local: NodeContext) -> None:
        """Make the posterior the prior of the next window."""

    # --- what is to come if nothing is seen: see `pcnet.forecasting`; a node has no part in it unless it says so ------
    def standing(self, local: NodeContext) -> ForecastStart | None:
        """What is believed now of numbers of its own that go on, or stay as they are."""
        return None

    def origin(self, local: NodeContext, now: ForecastContext) -> Tensor:
        """These numbers (B, n) as others that stay as they are, where they themselves would be led from above."""
        return now.own

    def drift(self, local: NodeContext, now: ForecastContext) -> Tensor:
        """How fast they change, (B, n)."""
        return torch.zeros_like(now.own)

    def forecast_message(self, local: NodeContext, link: Link, now: ForecastContext) -> Tensor:
        """The value (B, ...) that it would predict along a link below."""
        raise GraphError(f"{self.title} does not say what is to come")

    def forecast_value(self, local: NodeContext, now: ForecastContext) -> Tensor | None:
        """What a forecast shows of it, (B, dim): a value, or what would be observed but for its noise."""
        return None

    def forecast(
        self, local: NodeContext, step: Tensor, every: int, count: int, parameters: bool
    ) -> list[ForecastStep] | None:
        """What is to come after each `every` steps (B,) in time, `count` times, if it can say so all by itself.

        parameters: whether what is not known of them counts.
        """
        return None

    def fallbacks(self, local: NodeContext) -> Tensor | None:
        """How often a named fallback acted; (B,), or None where there is none."""
        return None

"""Immutable, validated settings: the class decorator and the field types of nodes, integrators, estimators, kernels."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Annotated, Any, NamedTuple, TypeVar, dataclass_transform, get_args, get_type_hints

import numpy as np
import torch
from pydantic import AfterValidator, BeforeValidator, ConfigDict, ValidationError
from pydantic.dataclasses import dataclass, rebuild_dataclass
from torch import Tensor

from pcnet.errors import ImmutableError, SettingError, suggestion

C = TypeVar("C", bound=type)
KINDS: dict[str, list[type]] = {}
"""All classes decorated with `settings`, by name. These are the kinds that a model file may contain."""


@dataclass_transform(frozen_default=True, eq_default=False)
def settings(cls: C) -> C:
    """Make a class an immutable pydantic dataclass that validates its fields and rejects unknown ones.

    Instances are compared by identity because their fields hold tensors and functions.
    """
    for name in vars(cls).get("__annotations__", {}):
        inherited = next((vars(base)[name] for base in cls.__mro__[1:] if name in vars(base)), None)
        if isinstance(inherited, (property, functools.cached_property, FunctionType, classmethod, staticmethod)):
            raise SettingError(
                f"{cls.__name__}: a setting cannot be called {name!r}, which is a property or method of "
                f"{cls.__mro__[1].__name__}; give it another name"
            )
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, defer_build=True)
    made: Any = dataclass(cls, config=config, frozen=True, eq=False, repr=False)
    validated_init: Callable[..., None] = made.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not made.__pydantic_complete__:  # its first use: most kinds are not used by a process
            rebuild_dataclass(made)
            made.__init__ = init
        try:
            validated_init(self, *args, **kwargs)
        except ValidationError as error:
            has_name = "name" in type(self).__dataclass_fields__
            name = kwargs.get("name", args[0] if args else None) if has_name else None
            raise SettingError(explain(type(self), name, error)) from None
        except TypeError as error:
            raise SettingError(f"{type(self).__name__}: {error}") from None

    def fixed(self: Any, name: str, *_: Any) -> None:
        raise ImmutableError(
            f"{name!r} of a {type(self).__name__} cannot be changed: settings are immutable; make a new one, for "
            f"example dataclasses.replace(old, {name}=...)"
        )

    init.__wrapped__ = validated_init  # type: ignore[attr-defined]
    KINDS.setdefault(made.__name__, []).append(made)
    made.__init__, made.__setattr__, made.__delattr__ = init, fixed, fixed
    return made  # type: ignore[no-any-return]


def explain(cls: type, name: object, error: ValidationError) -> str:
    """The message of a validation error: for each problem the setting, what is wrong, and the closest known name."""
    if not dataclasses.is_dataclass(cls) or "__dataclass_fields__" not in vars(cls):
        return f"decorate {cls.__name__} with pcnet.settings.settings, so that its settings are known"
    known = [field.name for field in dataclasses.fields(cls)]
    problems = []
    for item in error.errors():
        message = item["msg"].removeprefix("Value error, ")
        if not item["loc"]:  # raised by __post_init__, whose messages name the object
            return message
        first = item["loc"][0]
        field = known[first] if isinstance(first, int) and first < len(known) else str(first)
        if item["type"] == "unexpected_keyword_argument":
            foreign = getattr(cls, "INSTEAD", {}).get(field)
            problems.append(f"unknown setting {field!r}; {f'use {foreign}' if foreign else suggestion(field, known)}")
        elif item["type"] == "unexpected_positional_argument":
            problems.append(f"setting {field!r} must be given by name: {field}=...")
        elif item["type"] in ("missing", "missing_argument"):
            how = f'{cls.__name__}("x", ...)' if field == "name" else f"{field}=...{_described(cls, field)}"
            problems.append(f"setting {field!r} is required: {how}")
        else:
            problems.append(f"setting {field!r}: {message}")
    return (f"{cls.__name__} {name!r}: " if isinstance(name, str) else f"{cls.__name__}: ") + "; ".join(problems)


def _described(cls: type, field: str) -> str:
    """The first sentence about a setting in the docstring of its class, in brackets."""
    found = re.search(rf"^ +{field}: (.+?)(?:\.\s|\.$|;)", cls.__doc__ or "", flags=re.MULTILINE | re.DOTALL)
    return "" if found is None else f" ({' '.join(found[1].split())})"


def to_tensor(value: Any) -> Any:
    """A number, list, array or tensor as a new float64 tensor; ValueError for anything else, and for ragged lists."""
    if isinstance(value, Tensor):
        return value.detach().to(torch.float64, copy=True)  # so that later changes by the caller have no effect
    if isinstance(value, bool) or not isinstance(value, (int, float, list, tuple, np.ndarray, np.number)):
        raise ValueError(f"must be a number or an array of numbers, not {type(value).__name__}")
    try:
        return torch.tensor(np.asarray(value, dtype=np.float64))
    except (TypeError, ValueError, OverflowError):
        raise ValueError("must be a number or a rectangular array of numbers") from None


def _require(condition: Callable[[Tensor], Tensor], message: str) -> Callable[[Tensor], Tensor]:
    """A validator that raises ValueError(message) unless the condition holds for all elements."""

    def check(value: Tensor) -> Tensor:
        if not bool(condition(value).all()):
            raise ValueError(message)
        return value

    return check


finite = _require(torch.isfinite, "must be finite")
positive = _require(lambda value: value > 0, "must be positive")
not_negative = _require(lambda value: value >= 0, "must not be negative")
fraction = _require(lambda value: (value >= 0) & (value < 1), "must be at least 0 and below 1")
whole = _require(
    lambda value: torch.tensor(value.numel() > 0) & (value >= 1).all() & (value == value.round()).all(),
    "must be whole numbers of observations, 1 or more",
)


class TrailingDims(NamedTuple):
    """Annotation of a field: its last `dims` dimensions are its own, all leading ones are batch dimensions."""

    dims: int


Numbers = Annotated[Tensor, BeforeValidator(to_tensor), AfterValidator(finite)]
"""A finite number, or an array of them, all of whose dimensions are batch dimensions."""
Positive = Annotated[Numbers, AfterValidator(positive)]
NotNegative = Annotated[Numbers, AfterValidator(not_negative)]
Fraction = Annotated[Numbers, AfterValidator(fraction)]
Period = Annotated[Numbers, AfterValidator(whole)]
Vector = Annotated[Numbers, TrailingDims(1)]  # a number, or (..., channels)
PositiveVector = Annotated[Positive, TrailingDims(1)]
NotNegativeVector = Annotated[NotNegative, TrailingDims(1)]
Matrix = Annotated[Numbers, TrailingDims(2)]  # (..., rows, columns)


def trailing_dims(cls: type) -> Mapping[str, int]:
    """The number of own trailing dimensions of each setting of a class; see `TrailingDims`."""
    return _trailing_dims(cls)


@functools.cache
def _trailing_dims(cls: Any) -> Mapping[str, int]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: _marked(hints[field.name]) for field in dataclasses.fields(cls)}


def _marked(hint: Any) -> int:
    """The largest `TrailingDims` anywhere in a type."""
    parts = (*getattr(hint, "__metadata__", ()), *get_args(hint))
    return max((part.dims if isinstance(part, TrailingDims) else _marked(part) for part in parts), default=0)


def broadcast(*shapes: torch.Size) -> torch.Size:
    """The common shape of several batch shapes; RuntimeError if there is none."""
    try:
        return torch.Size(np.broadcast_shapes(*shapes))  # torch's own imports sympy, which takes half a second
    except ValueError as error:
        raise RuntimeError(str(error)) from None


def batch_shape_of(part: Any) -> torch.Size:
    """The common batch shape of all settings of an object, nested ones included."""
    shapes = []
    for name, own in trailing_dims(type(part)).items():
        value = getattr(part, name)
        if isinstance(value, Tensor):
            shapes.append(value.shape[: max(value.dim() - own, 0)])
        elif dataclasses.is_dataclass(value):
            shapes.append(batch_shape_of(value))
    return broadcast(*shapes)


def at_least_1d(value: Tensor) -> Tensor:
    """A scalar as a tensor (1,); other tensors unchanged."""
    return value if value.dim() else value[None]


def check_size(title: str, name: str, value: Tensor, size: int) -> None:
    """Raise `SettingError` unless a setting is one number or ends in a dimension of this size."""
    given = at_least_1d(value).shape[-1]
    if given not in (1, size):
        batch = "for a batch of single values add a dimension: [:, None]"
        raise SettingError(f"{title}: {name} must be one number or end in {size}, not in {given} ({batch})")


def check_shapes(title: str, **values: Tensor) -> None:
    """Raise `SettingError` unless the shapes of these settings fit together."""
    try:
        broadcast(*(value.shape for value in values.values()))
    except RuntimeError:
        shapes = " and ".join(f"{name} {tuple(value.shape)}" for name, value in values.items())
        raise SettingError(f"{title}: the shapes of {shapes} do not fit together") from None


def number(value: float) -> Tensor:
    """A float64 scalar, for defaults of `Numbers` fields."""
    return torch.tensor(value, dtype=torch.float64)

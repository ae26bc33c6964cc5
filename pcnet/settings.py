"""Validated, immutable settings: the decorator and the field types that every part is declared with."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar, dataclass_transform, get_args, get_type_hints

import numpy as np
import torch
from pydantic import AfterValidator, BeforeValidator, ConfigDict, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from pcnet.errors import ImmutableError, SettingError

C = TypeVar("C", bound=type)
KINDS: dict[str, list[type]] = {}
"""All classes that were declared by `settings`, by their names: what a file may ask for."""


@dataclass_transform(frozen_default=True, eq_default=False)
def settings(cls: C) -> C:
    """Turn a class into an immutable, validated pydantic dataclass that refuses unknown settings.

    Instances compare by identity, since their fields hold tensors and functions.
    """
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    made: Any = dataclass(cls, config=config, frozen=True, eq=False, repr=False)
    validated_init: Callable[..., None] = made.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
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
            f"{name!r} of a {type(self).__name__} cannot be changed: settings are fixed once made; make a new one, for "
            f"example dataclasses.replace(old, {name}=...)"
        )

    init.__wrapped__ = validated_init  # type: ignore[attr-defined]
    KINDS.setdefault(made.__name__, []).append(made)
    made.__init__, made.__setattr__, made.__delattr__ = init, fixed, fixed
    return made  # type: ignore[no-any-return]


def explain(cls: type, name: object, error: ValidationError) -> str:
    """Say in one sentence a problem what is wrong with which setting, and which one was probably meant."""
    if not dataclasses.is_dataclass(cls) or "__dataclass_fields__" not in vars(cls):
        return f"decorate {cls.__name__} with pcnet.settings.settings, so that its settings are known"
    known = [field.name for field in dataclasses.fields(cls)]
    who = f"{cls.__name__} {name!r}" if isinstance(name, str) else cls.__name__
    problems = []
    for item in error.errors():
        message = item["msg"].removeprefix("Value error, ")
        if not item["loc"]:  # raised by the class itself, which names itself
            return message
        first = item["loc"][0]
        field = known[first] if isinstance(first, int) and first < len(known) else str(first)
        if item["type"] == "unexpected_keyword_argument":
            near = difflib.get_close_matches(field, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known settings: {', '.join(known)}"
            problems.append(f"unknown setting {field!r}; {hint}")
        elif item["type"] == "unexpected_positional_argument":
            problems.append(f"setting {field!r} must be given by name: {field}=...")
        elif item["type"] in ("missing", "missing_argument"):
            how = f'{cls.__name__}("x", ...)' if field == "name" else f"{field}=..."
            problems.append(f"setting {field!r} is required: {how}")
        else:
            problems.append(f"setting {field!r}: {message}")
    return f"{who}: " + "; ".join(problems)


def to_tensor(value: Any) -> Any:
    """Accept numbers, lists, arrays and tensors as float64 tensors; leave anything else to be refused."""
    if isinstance(value, Tensor):
        return value.detach().to(torch.float64, copy=True)  # what the caller does to it later is no matter of ours
    if isinstance(value, bool):
        raise ValueError("must be a number or an array of numbers, not a bool")
    if isinstance(value, (int, float, list, tuple, np.ndarray, np.number)):
        try:
            return torch.tensor(np.asarray(value, dtype=np.float64))
        except (TypeError, ValueError, OverflowError):
            raise ValueError("must be a number or a rectangular array of numbers") from None
    raise ValueError(f"must be a number or an array of numbers, not {type(value).__name__}")


def finite(value: Tensor) -> Tensor:
    if not bool(torch.isfinite(value).all()):
        raise ValueError("must be finite")
    return value


def positive(value: Tensor) -> Tensor:
    if not bool((value > 0).all()):
        raise ValueError("must be positive")
    return value


def not_negative(value: Tensor) -> Tensor:
    if not bool((value >= 0).all()):
        raise ValueError("must not be negative")
    return value


def whole_period(value: Tensor) -> Tensor:
    if not bool(((value >= 1) & (value == value.round())).all()):
        raise ValueError("must be whole numbers of observations, 1 or more")
    return value


def fraction(value: Tensor) -> Tensor:
    if not bool(((value >= 0) & (value < 1)).all()):
        raise ValueError("must be at least 0 and below 1")
    return value


class Own(NamedTuple):
    """Marks how many trailing dimensions of a setting are its own; those before them are batch."""

    dims: int


Numbers = Annotated[Tensor, BeforeValidator(to_tensor), AfterValidator(finite)]
"""A number, or an array of them whose leading dimensions are batch."""
Positive = Annotated[Numbers, AfterValidator(positive)]
NotNegative = Annotated[Numbers, AfterValidator(not_negative)]
Fraction = Annotated[Numbers, AfterValidator(fraction)]
Period = Annotated[Numbers, AfterValidator(whole_period)]


Vector = Annotated[Numbers, Own(1)]
"""A number, or (..., channels)."""
PositiveVector = Annotated[Positive, Own(1)]
Matrix = Annotated[Numbers, Own(2)]
"""(..., rows, columns)."""


def own_dims(cls: type) -> Mapping[str, int]:
    """How many trailing dimensions of each setting of a class are its own."""
    return _own_dims(cls)


@functools.cache
def _own_dims(cls: Any) -> Mapping[str, int]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: _marked(hints[field.name]) for field in dataclasses.fields(cls)}


def _marked(hint: Any) -> int:
    parts = (*getattr(hint, "__metadata__", ()), *get_args(hint))
    return max((part.dims if isinstance(part, Own) else _marked(part) for part in parts), default=0)


def broadcast(*shapes: torch.Size) -> torch.Size:
    """The batch dimensions of several settings together."""
    return torch.Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def batch_shape_of(part: Any) -> torch.Size:
    """The batch dimensions of a part (a node, a mover, a kernel) that was declared by `settings`."""
    shapes = []
    for name, own in own_dims(type(part)).items():
        value = getattr(part, name)
        if isinstance(value, Tensor):
            shapes.append(value.shape[: max(value.dim() - own, 0)])
        elif dataclasses.is_dataclass(value):
            shapes.append(batch_shape_of(value))
    return broadcast(*shapes)


def listed(value: Tensor) -> Tensor:
    """A setting with a last dimension of its own: one number is a list of one."""
    return value if value.dim() else value[None]


def number(value: float) -> Tensor:
    """A default for a `Numbers` field."""
    return torch.tensor(value, dtype=torch.float64)

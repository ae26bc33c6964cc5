"""A fingerprint of a model: its numbers, and the code of its functions."""

import dataclasses
import hashlib
from collections.abc import Mapping
from functools import partial
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.functions.base import Function
from pcnet.model.model import Model
from pcnet.settings import trailing_dims


def digest(model: Model) -> str:
    """A fingerprint of a model that is the same in every process.

    It covers numbers, the code of functions, and what belongs to them: arguments of `functools.partial`, the object of
    a bound method, attributes of callable objects, closures. It does not cover global variables that functions use, nor
    global functions that they call.

    Raises:
        SettingError: If the model contains an object that hides what it holds.
    """
    texts: list[bytes] = []
    for part in _parts(model):
        _add(part, (), texts)
    return hashlib.sha256(b"\0".join([*texts, b""])).hexdigest()


def covers(model: Model) -> bool:
    """Whether the digest covers everything that the model does: shipped kinds of node, and no Python functions."""
    return all(map(_covered, _parts(model)))


def _parts(model: Model) -> tuple[Any, ...]:
    """Everything that a model consists of."""
    hypotheses = () if model.hypotheses is None else (model.hypotheses,)
    return (*model.graph.nodes.values(), *link_keys(model), model.schedule, *hypotheses)


def _covered(value: Any) -> bool:
    if isinstance(value, Function):
        return value.identity_key is not value and _shipped(value) and _covered(value.identity_key)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _shipped(value) and all(_covered(getattr(value, name)) for name in trailing_dims(type(value)))
    if isinstance(value, tuple):
        return all(map(_covered, value))
    return isinstance(value, (*PLAIN, Tensor, np.ndarray)) or (isinstance(value, type) and _shipped(value))


def _shipped(value: Any) -> bool:
    return (value if isinstance(value, type) else type(value)).__module__.startswith("pcnet.")


def link_keys(model: Model) -> list[tuple[Any, ...]]:
    """The links of a model as plain tuples: key, names, function."""
    return [(link.key, *link.names, link.function) for link in model.graph.links]


def _add(value: Any, within: tuple[int, ...], texts: list[bytes]) -> None:
    """Add the parts of a value that make it what it is; `SettingError` if they cannot be seen.

    within: the values that contain it, by identity, so that circles end.
    """
    if type(value) in PLAIN:
        texts.append(repr(value).encode())
    elif id(value) in within:
        texts.append(b"circle %d" % (len(within) - within.index(id(value))))
    else:
        _add_contents(value, (*within, id(value)), texts)


def _add_contents(value: Any, within: tuple[int, ...], texts: list[bytes]) -> None:
    def add(*parts: Any) -> None:
        texts.append(str(len(parts)).encode())
        for part in parts:
            _add(part, within, texts)

    if isinstance(value, (Tensor, np.ndarray)):
        texts.append(_array(value))
    elif isinstance(value, Function) and value.identity_key is not value:
        _add(value.identity_key, within, texts)
    elif isinstance(value, torch.nn.Module):
        add(type(value), type(value).forward, *value.state_dict().values())
        for name, module in value.named_modules():
            public = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
            add(name, type(module), public)
    elif (parts := _parts_of(value)) is not None:
        add(*parts)
    elif isinstance(value, (type, *NAMED)):
        texts.append(f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}".encode())
    elif dataclasses.is_dataclass(value):
        texts.append(type(value).__qualname__.encode())
        for field in dataclasses.fields(value):
            texts.append(field.name.encode())
            _add(getattr(value, field.name), within, texts)
    elif isinstance(value, (set, frozenset)):
        found = []
        for each in value:
            mine: list[bytes] = []
            _add(each, within, mine)
            found.append(b"\0".join(mine))
        texts += sorted(found)
    elif isinstance(value, (*PLAIN, np.generic)):
        texts.append(repr(value.item() if isinstance(value, np.generic) else value).encode())
    else:
        add(type(value), _rules(type(value)), _attributes(value))


def _parts_of(value: Any) -> tuple[Any, ...] | None:
    """What makes a function or a container what it is; None for anything else."""
    if isinstance(value, partial):
        return "partial", value.func, value.args, value.keywords
    if isinstance(value, MethodType):
        return "method", value.__func__, value.__self__
    if isinstance(value, FunctionType):
        bound = tuple(_cell(cell) for cell in value.__closure__ or ())
        return value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__, bound
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, value.co_consts
    if isinstance(value, Mapping):
        return tuple(part for key in sorted(value, key=repr) for part in (key, value[key]))
    return tuple(value) if isinstance(value, (tuple, list)) else None


def _array(value: Tensor | np.ndarray[Any, Any]) -> bytes:
    numbers = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
    if numbers.dtype == object:
        raise SettingError("an array of objects cannot be compared with that of another process; use numbers")
    numbers = numbers if np.iscomplexobj(numbers) else numbers.astype(np.float64)
    return str(numbers.shape).encode() + numbers.tobytes()


def _cell(cell: CellType) -> Any:
    """What a closure holds; nothing for a variable that was not assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _rules(kind: type) -> dict[str, Any]:
    """The functions that a class of the user defines, and those of its bases; shipped ones are known by name."""
    found: dict[str, Any] = {}
    for each in reversed(kind.__mro__):
        if not _shipped(each) and each is not object:
            found |= {name: rule for name, rule in vars(each).items() if isinstance(rule, FunctionType)}
    return found


def _attributes(value: Any) -> dict[str, Any]:
    """All attributes of an object; `SettingError` for one that hides them."""
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    if not hasattr(value, "__dict__") and not slots and type(value).__basicsize__ > object.__basicsize__:
        raise SettingError(
            f"{value!r} is part of the model, and what it holds cannot be compared with that of another process; use "
            "numbers, tensors, functions, or objects with attributes of these"
        )
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return found | getattr(value, "__dict__", {})


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range)
DESCRIPTORS = (MethodDescriptorType, WrapperDescriptorType)
NAMED = (
    BuiltinFunctionType,
    np.ufunc,
    ModuleType,
    torch.dtype,
    torch.device,
    MethodDescriptorType,
    WrapperDescriptorType,
)
"""Things that their name identifies."""

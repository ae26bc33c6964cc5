"""A fingerprint of a model: its numbers, and the code of its functions."""

import dataclasses
import hashlib
from collections.abc import Iterable
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pcnet.functions.base import Function
from pcnet.model.model import Model
from pcnet.settings import trailing_dims


def digest(model: Model) -> str:
    """A fingerprint of a model that is the same in every process.

    It does not cover global variables that functions use, nor functions that they call.
    """
    found = hashlib.sha256()
    for part in _parts(model):
        for text in _texts(part):
            found.update(text + b"\0")
    return found.hexdigest()


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


def _texts(value: Any) -> Iterable[bytes]:
    if isinstance(value, (Tensor, np.ndarray)):
        numbers = np.asarray(value, dtype=np.float64)
        yield str(numbers.shape).encode() + numbers.tobytes()
    elif isinstance(value, Function) and value.identity_key is not value:
        yield from _texts(value.identity_key)
    elif isinstance(value, torch.nn.Module):
        yield from _texts((type(value), type(value).forward, *value.state_dict().values()))
    elif isinstance(value, FunctionType):
        bound = [cell.cell_contents for cell in value.__closure__ or ()]
        yield from _texts((value.__qualname__, value.__code__, value.__defaults__))
        yield from _texts(tuple(each for each in bound if isinstance(each, (*PLAIN, Tensor, np.ndarray))))
    elif isinstance(value, CodeType):
        yield from _texts((value.co_code, value.co_names, value.co_consts))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield type(value).__qualname__.encode()
        for name in trailing_dims(type(value)):
            yield name.encode()
            yield from _texts(getattr(value, name))
    elif isinstance(value, tuple):
        yield str(len(value)).encode()
        for each in value:
            yield from _texts(each)
    elif isinstance(value, PLAIN):
        yield repr(value).encode()
    else:  # other objects: only their type is the same in every process
        yield (value if isinstance(value, type) else type(value)).__qualname__.encode()


PLAIN = (bool, int, float, complex, str, bytes, type(None))

"""Batching of models: models that differ only in numbers become one model with a batch dimension."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Hashable, Iterable, Sequence
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pcnet.functions.base import Function
from pcnet.model.graph import Model
from pcnet.settings import own_dims

PLAIN = (bool, int, float, complex, str, bytes, type(None))


def batch_key(model: Model) -> Hashable:
    """Everything about a model but its numbers; models with equal keys fit into one batch."""
    return (
        tuple(_key(node) for node in model.graph.nodes.values()),
        tuple(_key(link) for link in _links(model)),
        _key(model.schedule),
    )


def stack_models(models: Sequence[Model]) -> Model:
    """Stack models with equal keys along a new leading batch dimension; settings that all share stay unbatched."""
    first = models[0]
    nodes = {name: _stack([model.graph[name] for model in models]) for name in first.graph.nodes}
    return Model(first.graph.with_nodes(nodes), _stack([model.schedule for model in models]))


def digest(model: Model) -> str:
    """Fingerprint of a model, its numbers and the code of its functions, equal in every process.

    It does not cover global variables that a function reads, nor other functions that it calls.
    """
    fingerprint = hashlib.sha256()
    for part in (*model.graph.nodes.values(), *_links(model), model.schedule):
        for text in _texts(part):
            fingerprint.update(text + b"\0")
    return fingerprint.hexdigest()


def _links(model: Model) -> list[tuple[Any, ...]]:
    return [
        (link.kind, link.parent.name, link.child.name, link.of.name if link.of is not None else None, link.function)
        for link in model.graph.links
    ]


def _fields(part: Any) -> Iterable[tuple[str, Any, int]]:
    """Name, value and number of own (not batch) dimensions of each setting of a part."""
    return ((name, getattr(part, name), own) for name, own in own_dims(type(part)).items())


def _key(value: Any, own: int = 0) -> Hashable:
    if isinstance(value, Tensor):
        return ("numbers", *_padded(value, own).shape)
    if isinstance(value, Function):
        return value.identity_key
    if dataclasses.is_dataclass(value):
        return (type(value), *((name, _key(each, dims)) for name, each, dims in _fields(value)))
    if isinstance(value, tuple):
        return tuple(_key(each) for each in value)
    return value if isinstance(value, Hashable) else id(value)


def _stack(values: Sequence[Any], own: int = 0) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        if all(torch.equal(value, first) for value in values[1:]):
            return first
        return torch.stack([_padded(value, own) for value in values])
    if isinstance(first, Function):
        return first
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        stacked = {name: _stack([getattr(v, name) for v in values], dims) for name, _, dims in _fields(first)}
        return dataclasses.replace(first, **stacked)
    if isinstance(first, tuple):
        return tuple(_stack(each) for each in zip(*values, strict=True))
    return first


def _padded(value: Tensor, own: int) -> Tensor:
    """A setting with all its own dimensions: one number for all channels becomes (1,)."""
    return value.reshape((1,) * (own - value.dim()) + value.shape)


def _texts(value: Any) -> Iterable[bytes]:
    """Byte strings that identify a value."""
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
        for name, each, _ in _fields(value):
            yield name.encode()
            yield from _texts(each)
    elif isinstance(value, tuple):
        yield str(len(value)).encode()
        for each in value:
            yield from _texts(each)
    elif isinstance(value, PLAIN):
        yield repr(value).encode()
    else:  # nothing else about other objects is the same in every process
        yield (value if isinstance(value, type) else type(value)).__qualname__.encode()

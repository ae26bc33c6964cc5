"""Batching of models: models that differ only in numbers become one model with a batch dimension."""

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pcnet.functions.base import Function
from pcnet.model.digest import link_keys
from pcnet.model.model import Model
from pcnet.settings import trailing_dims


def batch_key(model: Model) -> Hashable:
    """Everything about a model but its numbers; models with equal keys fit into one batch."""
    return (
        tuple(_key(node) for node in model.graph.nodes.values()),
        tuple(_key(link) for link in link_keys(model)),
        _key(model.schedule),
        model.hypotheses if model.hypotheses is None else dataclasses.astuple(model.hypotheses),
    )


def stack_models(models: Sequence[Model]) -> Model:
    """Stack models with equal keys along a new leading batch dimension; settings that all share stay unbatched."""
    first = models[0]
    nodes = {name: _stack([model.graph[name] for model in models]) for name in first.graph.nodes}
    return Model(first.graph.with_nodes(nodes), _stack([model.schedule for model in models]), first.hypotheses)


def _fields(part: Any) -> Iterable[tuple[str, Any, int]]:
    """Name, value and number of own (not batch) dimensions of each setting of a part."""
    return ((name, getattr(part, name), own) for name, own in trailing_dims(type(part)).items())


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

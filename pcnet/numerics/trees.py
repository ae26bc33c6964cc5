"""Trees of tensors: named tuples whose fields are tensors or further such tuples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=tuple[Any, ...])


def tree_map(function: Callable[[Tensor], Tensor], tree: T) -> T:
    """The same tree with a function applied to each tensor."""
    return _rebuilt(tree, [_apply(function, part) for part in tree])


def _apply(function: Callable[[Tensor], Tensor], part: Any) -> Any:
    return tree_map(function, part) if isinstance(part, tuple) else function(part)


def _rebuilt(tree: T, parts: list[Any]) -> T:
    return type(tree)(*parts) if _names(tree) else type(tree)(parts)


def _names(tree: tuple[Any, ...]) -> tuple[str, ...] | None:
    """The names of the fields of a named tuple; None for a plain one."""
    names: tuple[str, ...] | None = getattr(tree, "_fields", None)
    return names


def select(mask: Tensor, new: T, old: T) -> T:
    """`new` where the mask (B,) holds and `old` elsewhere; parts that are the same object are kept."""
    if new is old:
        return new
    return _rebuilt(new, [_select(mask, fresh, kept) for fresh, kept in zip(new, old, strict=True)])


def _select(mask: Tensor, new: Any, old: Any) -> Any:
    if new is old:
        return new
    if isinstance(new, tuple):
        return select(mask, new, old)
    return torch.where(mask.view(-1, *(1,) * (new.dim() - 1)), new, old)


def flatten(tree: Any, path: str) -> dict[str, Tensor]:
    """All tensors of a tree by their paths: path/field/field."""
    if not isinstance(tree, tuple):
        return {path: tree}
    found: dict[str, Tensor] = {}
    for name, part in zip(_names(tree) or map(str, range(len(tree))), tree, strict=True):
        if isinstance(part, tuple):
            found |= flatten(part, f"{path}/{name}")
        else:
            found[f"{path}/{name}"] = part
    return found


def changes(new: Any, old: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a tree that are not the same objects as in an older one, each after its path."""
    if new is old:
        return
    if not isinstance(new, tuple):
        yield path, new
        return
    for name, part, kept in zip(_names(new) or map(str, range(len(new))), new, old, strict=True):
        if part is not kept:
            yield from changes(part, kept, f"{path}/{name}")


def unflatten(like: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A tree of the form of `like`, with tensors taken out of `tensors`; KeyError unless they fit."""
    if not isinstance(like, tuple):
        found = tensors.pop(path)
        if found.shape != like.shape or found.dtype != like.dtype:
            raise KeyError(path)
        return found
    names = _names(like) or tuple(map(str, range(len(like))))
    parts = [unflatten(part, f"{path}/{name}", tensors) for name, part in zip(names, like, strict=True)]
    return _rebuilt(like, parts)


def spans(sizes: Iterable[int], first: int = 0) -> list[slice]:
    """Consecutive slices of these sizes, from `first` on."""
    ends = list(itertools.accumulate(sizes, initial=first))
    return [slice(*pair) for pair in itertools.pairwise(ends)]

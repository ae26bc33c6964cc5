"""One batch element of a program, and the constants in which batch elements differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pcnet.engine.compiled.errors import UntraceableError
from pcnet.engine.program import Program


class ElementProgram:
    """The program of one batch element, and those of its constants that differ over the batch."""

    def __init__(self, program: Program, element: int) -> None:
        with torch.inference_mode(False):
            one = program.spec.batch == 1
            self.program = program if one else Program(program.model, program.spec.of_element(element), program.smooth)

    @cached_property
    def leaves(self) -> dict[str, Tensor]:
        return _constants(self.program)


def varying_settings(program: Program) -> dict[str, Tensor]:
    """The constants of the nodes that differ over the batch, (B, ...), by their path.

    Raises:
        UntraceableError: If batch elements differ in more than numbers.
    """
    if program.spec.batch == 1:
        return {}
    whole, one = _constants(program), ElementProgram(program, 0).leaves
    if whole.keys() != one.keys():
        raise UntraceableError(f"batch elements differ in form: {min(whole.keys() ^ one.keys())}")
    found = {}
    batch = program.spec.batch
    for path, value in whole.items():
        single = one[path]
        if value.shape == single.shape and torch.equal(value, single):
            continue
        if _repeats(value, single, batch):
            continue
        if value.shape != (batch, *single.shape[1:]) or single.shape[:1] != (1,):
            raise UntraceableError(f"a constant that depends on the batch: {path}")
        if not bool(((value == value[:1]) | (value.isnan() & value[:1].isnan())).all()):
            found[path] = value
    return found


def _repeats(value: Tensor, single: Tensor, batch: int) -> bool:
    """Whether constants (k·B, ...) of k modes are those of one batch element (k, ...), whatever the element."""
    k = len(single) if single.dim() else 0
    if k < 2 or value.shape != (k * batch, *single.shape[1:]):
        return False
    return torch.equal(value.reshape(k, batch, *single.shape[1:]), single[:, None].expand(k, batch, *single.shape[1:]))


def _constants(program: Program) -> dict[str, Tensor]:
    """All tensors that a program was bound to, by path."""
    noises = {name: links.noise for name, links in program.links.items()}
    return dict(_tensors((program.interval, program.bound, noises), ""))


def _tensors(part: Any, path: str, seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """All tensors within an object, with their paths."""
    seen = set() if seen is None else seen
    if isinstance(part, Tensor):
        yield path, part
        return
    if isinstance(part, (str, int, float, bool, type(None), type, slice, torch.dtype, torch.nn.Module)):
        return
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, Mapping):
        items: Any = ((str(i), value) for i, value in enumerate(part.values()))
    elif isinstance(part, tuple) and hasattr(part, "_fields"):
        items = zip(part._fields, part, strict=True)
    elif isinstance(part, (tuple, list)):
        items = ((str(i), value) for i, value in enumerate(part))
    elif dataclasses.is_dataclass(part):
        items = ((field.name, getattr(part, field.name)) for field in dataclasses.fields(part))
    else:
        items = vars(part).items() if hasattr(part, "__dict__") and not callable(part) else ()
    for name, value in items:
        yield from _tensors(value, f"{path}/{name}", seen)

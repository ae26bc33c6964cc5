"""Lists of variants on disk, so that a second process need not record the ticks of a model again.

A list is kept for models that their digest covers entirely: shipped kinds of node, and functions without Python code of
the user. Its key covers the model, all code of this package, torch, LLVM and the processor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from pcnet.engine.compiled.layout import Slot, TickKind
from pcnet.engine.compiled.native import platform
from pcnet.model.digest import covers
from pcnet.model.model import Model


def identity(model: Model, about: str, details: object) -> str | None:
    """The key of the list of a model; None if its digest does not cover it.

    about: the digest. details: what the variants depend on beside the model.
    """
    if not covers(model):
        return None
    parts = (about, repr(details), sources(), torch.__version__, platform())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@cache
def sources() -> str:
    """A fingerprint of the code of this package."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def encode(record: Iterable[Slot], variants: Iterable[dict[str, Any]]) -> bytes:
    """A list as bytes. Variants have kind, outcomes, code, derived, depends, changes, form and operations."""
    rows = [[slot.name, slot.start, slot.shape, str(slot.dtype).removeprefix("torch.")] for slot in record]
    return json.dumps({"record": rows, "variants": list(variants)}).encode()


def decode(content: bytes) -> tuple[list[Slot], list[dict[str, Any]]]:
    about = json.loads(content)
    record = [Slot(name, start, tuple(shape), getattr(torch, dtype)) for name, start, shape, dtype in about["record"]]
    for each in about["variants"]:
        due, regular, first = each["kind"]
        each["kind"] = TickKind(tuple(due), regular, first)
        each["outcomes"] = tuple(each["outcomes"])
        each["depends"], each["changes"] = frozenset(each["depends"]), frozenset(each["changes"])
    return record, about["variants"]

"""Griffe extension for the reference: gives settings classes and named tuples their signatures, as dataclasses have."""

from __future__ import annotations

from typing import Any

import griffe

DEFAULTS = {"Field": "default", "number": "value"}
"""Functions that wrap a default value, and the argument that holds it."""


class Settings(griffe.Extension):
    """Add the signature of `__init__`, with plain default values."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        settings = any(decorator.callable_path == "pcnet.settings.settings" for decorator in cls.decorators)
        if not settings and "NamedTuple" not in map(str, cls.bases):
            return
        line = cls.lineno
        cls.decorators.append(griffe.Decorator(griffe.ExprName("dataclasses.dataclass"), lineno=line, endlineno=line))
        for member in cls.members.values():
            if isinstance(member, griffe.Attribute):
                member.value = _default(member.value)


def _default(value: Any) -> Any:
    """The value inside `number(1.0)` or `Field(default=1, ge=1)`; None for a field without a default."""
    if not isinstance(value, griffe.ExprCall):
        return value
    argument = DEFAULTS.get(str(value.function))
    if argument is None:
        return value
    named = {a.name: a.value for a in value.arguments if isinstance(a, griffe.ExprKeyword)}
    plain = [a for a in value.arguments if not isinstance(a, griffe.ExprKeyword)]
    return named.get(argument, plain[0] if plain else None)

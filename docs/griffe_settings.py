"""Griffe extension for the reference.

It gives settings classes and named tuples their signatures, as dataclasses have, and takes the comment behind a field
or constant for its docstring.
"""

from __future__ import annotations

from typing import Any

import griffe

DEFAULTS = {"Field": "default", "number": "value"}
"""Functions that wrap a default value, and the argument that holds it."""


class Settings(griffe.Extension):
    """Add the signature of `__init__`, with plain default values, and docstrings from comments."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and attr.endlineno is not None and attr.lines:
            _, found, comment = attr.lines[-1].rpartition("  # ")
            if found and not comment.startswith(("type:", "noqa")):
                attr.docstring = griffe.Docstring(comment[0].upper() + comment[1:] + ".", parent=attr)

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

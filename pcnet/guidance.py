"""Guidance: objects that say what to type when they are asked for something that they do not have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pcnet.errors import UsageError, suggestion


def instead(table: Mapping[str, str]) -> dict[str, str]:
    """What to type by name, from a table with several names, divided by spaces, for the same advice."""
    return {name: advice for names, advice in table.items() for name in names.split()}


def arguments(**methods: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """What to type instead of arguments, by method; the advice for "()" is an example of a call."""
    return {method: instead(table) for method, table in methods.items()}


def unknown_argument(call: str, name: str, known: Iterable[str], advice: Mapping[str, str]) -> UsageError:
    """The error about an argument that a call does not have. advice: what to type, by names of other packages."""
    remedy = f"use {advice[name]}" if name in advice else suggestion(name, known)
    return UsageError(f"{call} has no argument {name!r}; {remedy}")


def _with_advice(method: Callable[..., Any], call: str, advice: Mapping[str, str]) -> Callable[..., Any]:
    """A method whose errors about missing and unknown arguments say what to type."""
    parameters = {name: each for name, each in inspect.signature(method).parameters.items() if name != "self"}
    needed = [name for name, each in parameters.items() if each.default is each.empty]

    @functools.wraps(method)
    def advised(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in parameters:
                raise unknown_argument(f"{call}()", name, parameters, advice)
        given = (*list(parameters)[: len(args)], *kwargs)
        for name in needed:
            if name not in given:
                raise UsageError(f"{call}() needs {name}: {advice.get('()', f'{call}({name}=...)')}")
        return method(self, *args, **kwargs)

    return advised


class Guided:
    """An object whose errors about unknown attributes, arguments and about object[key] say what to type.

    Names that begin with an underscore are left alone, and the errors are those that Python expects, so that hasattr,
    copy, pickle and notebooks work as with any other object.
    """

    __slots__ = ()
    CALLED: ClassVar[str] = ""  # the name of such an object in examples
    INSTEAD: ClassVar[Mapping[str, str]] = {}  # what to type instead of names that other packages use
    NODE: ClassVar[str] = ""  # how to read a node; {node} is its name
    LENGTH: ClassVar[str] = ""  # what to type instead of len(object)
    ARGUMENTS: ClassVar[Mapping[str, Mapping[str, str]]] = {}  # the same for arguments, by method

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, advice in cls.ARGUMENTS.items():
            if name in vars(cls):
                setattr(cls, name, _with_advice(vars(cls)[name], f"{cls.CALLED}.{name}", advice))

    def _node_names(self) -> Iterable[str]:
        """Names of nodes that somebody may ask for. AttributeError if the object is not complete yet."""
        return ()

    def _own(self, name: str) -> Any:
        """An attribute, or AttributeError without advice."""
        return object.__getattribute__(self, name)

    def _advice(self, name: str) -> str:
        """What to type instead of object.name."""
        if name in self.INSTEAD:
            return f"use {self.INSTEAD[name].replace('{name}', name)}"
        if self.NODE and name in self._node_names():
            return f"{name!r} is a node: use {self.NODE.format(node=name)}"
        own = [each for each in dir(type(self)) if not each.startswith("_") and not each.isupper()]
        return suggestion(name, own)

    if not TYPE_CHECKING:  # unknown names stay errors of types

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            try:
                advice = self._advice(name)
            except AttributeError:  # it is being made
                advice = "it is not complete"
            raise UsageError(f"a {self.CALLED} has no {name!r}; {advice}")

        def __getitem__(self, key: object) -> Any:
            names = [str(each) for each in self._node_names()]
            node = key[0] if isinstance(key, tuple) and key else key
            advice = self.NODE.format(node=node if node in names else names[0] if names else "x")
            if isinstance(node, str) and node not in names:
                advice += f"; nodes: {', '.join(names)}"
            shown = repr(key) if isinstance(key, str) else "..."
            raise UsageError(f"a {self.CALLED} is not read by {self.CALLED}[{shown}]; use {advice}")

        def __len__(self) -> int:
            raise UsageError(f"a {self.CALLED} has no length; {self.LENGTH or 'it is not a list'}")

        def __bool__(self) -> bool:
            return True

        __iter__ = None
        __contains__ = None

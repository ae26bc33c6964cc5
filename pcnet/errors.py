"""Exceptions that pcnet raises on purpose. Their messages say what is wrong, where, and what to type instead."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class PcnetError(Exception):
    """Base class of all errors raised by pcnet."""


class SettingError(PcnetError, ValueError):
    """A setting is unknown, missing or has an invalid value."""


class ImmutableError(SettingError, AttributeError):
    """A setting was assigned after construction."""


class GraphError(PcnetError, ValueError):
    """The graph cannot be built or run."""


class ScheduleError(PcnetError, ValueError):
    """A schedule does not fit the graph."""


class ObservationError(PcnetError, ValueError):
    """Observations do not fit the sensory nodes of the graph."""


class DivergenceError(PcnetError, ArithmeticError):
    """A belief is no longer finite."""


class CheckpointError(PcnetError, ValueError):
    """A checkpoint file is damaged or does not fit the model."""


class SpecificationError(PcnetError, ValueError):
    """A specification cannot be read, or a model cannot be written as one."""


class StudyError(PcnetError, ValueError):
    """A study or its file is invalid."""


class UsageError(PcnetError, AttributeError, TypeError):
    """An object does not have what it was asked for, as an attribute or by object[key]."""


class ResultError(PcnetError, KeyError):
    """A result does not contain what was asked for, or cannot be saved."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


def naming(
    error: type[PcnetError], instead: Mapping[str, str] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator for functions that make something from settings: errors of wrong types become pcnet errors.

    instead: what to type instead of arguments that other packages use, by their names.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except PcnetError:
                raise
            except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError) as why:
                name, known = function.__name__, inspect.signature(function).parameters
                unknown = re.match(rf"{name}\(\) got an unexpected keyword argument '(\w+)'", str(why))
                if unknown:
                    foreign = (instead or {}).get(unknown[1])
                    remedy = f"use {foreign}" if foreign else suggestion(unknown[1], known)
                    raise error(f"{name} has no argument {unknown[1]!r}; {remedy}") from None
                if str(why).startswith(f"{name}() missing"):
                    needed = [each.name for each in known.values() if each.default is each.empty]
                    missing = str(why).split("argument", 1)[1].lstrip("s: ")
                    raise error(f"{name}: {missing} must be given: {name}({', '.join(needed)})") from None
                raise error(f"{name}: {why}") from why

        return call

    return decorate


def suggestion(name: object, known: Iterable[object]) -> str:
    """End of an error about an unknown name: the closest known name, or all of them."""
    names = sorted(map(str, known))
    near = difflib.get_close_matches(str(name), names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"

"""Functions by name: what a file may call a flow, a mapping or an autocorrelation. Nothing is imported for a name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch

from pcnet.errors import SettingError
from pcnet.functions import systems as flows
from pcnet.functions.base import Function
from pcnet.functions.closed_form import Identity, Linear, Quadratic
from pcnet.functions.traced import WithCauses, TracedFunction

F = TypeVar("F", bound=Callable[..., Any])

_named: dict[str, Any] = {
    "identity": Identity(),
    "lorenz": flows.lorenz,
    "lotka_volterra": flows.lotka_volterra,
    "van_der_pol": flows.van_der_pol,
    "lorenz96": flows.lorenz96,
}
SHIPPED = frozenset(_named)
_makers: dict[str, Callable[..., Any]] = {}


@overload
def register(name: str, function: F) -> F: ...
@overload
def register(name: str, function: None = None) -> Callable[[F], F]: ...


def register(name: str, function: F | None = None) -> F | Callable[[F], F]:
    """Let files call a function of (state, parameters) by a name: register("spring", f), or @register("spring").

    A name that was given before is given to the new function, as when a cell of a notebook is run again.
    """
    if not isinstance(name, str) or not name.isprintable() or not name:
        raise SettingError(f"a name must be printable text, not {name!r}")

    def keep(given: F) -> F:
        if not callable(given):
            raise SettingError(f"{name!r}: {given!r} is not a function")
        if name in SHIPPED or name in _makers:
            raise SettingError(f"there is a function {name!r} already; choose another name")
        _named[name] = given
        return given

    return keep if function is None else keep(function)


def maker(name: str) -> Callable[[F], F]:
    """Let files have a function made from numbers: {"linear": {"matrix": [[…]]}} calls the maker of that name."""

    def keep(make: F) -> F:
        if name in _named or _makers.get(name, make) is not make:
            raise SettingError(f"there is a function {name!r} already; choose another name")
        _makers[name] = make
        return make

    return keep


@maker("linear")
def _linear(matrix: Any = None, offset: Any = None, causes: Any = None, dim: int | None = None) -> Linear:
    return Linear(_table(matrix), _table(offset), dim, _table(causes))


@maker("quadratic")
def _quadratic(coefficients: Any) -> Quadratic:
    return Quadratic(_table(coefficients))


@maker("lotka_volterra_of")
def _lotka_volterra(species: int, growth: Any = None) -> flows.LotkaVolterra:
    if isinstance(species, bool) or not isinstance(species, int):
        raise SettingError(f"species must be a whole number, not {species!r}")
    return flows.LotkaVolterra(species, _table(growth))


@maker("lorenz_of")
def _lorenz(sigma: float, beta: float) -> flows.Lorenz:
    return flows.Lorenz(float(sigma), float(beta))


def _table(value: Any) -> Any:
    if value is None:
        return None
    try:
        table = torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise SettingError(f"a matrix must be numbers in a rectangular array, not {value!r}") from None
    if not bool(torch.isfinite(table).all()):
        raise SettingError("the numbers of a matrix must be finite")
    return table


def names() -> list[str]:
    return sorted(_named)


def makers() -> Mapping[str, Callable[..., Any]]:
    return dict(_makers)


# --- to and from what a file holds ------------------------------------------------------------------------------------
def find(given: Any) -> Any:
    """The function that a file means by a name, or by the name of a maker and its numbers."""
    if isinstance(given, str):
        if given not in _named:
            raise SettingError(f"no function {given!r} is registered; {near(given, _named)}. See pcnet.register")
        return _named[given]
    if not isinstance(given, Mapping) or len(given) != 1:
        raise SettingError(f"a function is a registered name or {{maker: numbers}}, not {given!r}")
    ((name, numbers),) = given.items()
    if name not in _makers:
        raise SettingError(f"no maker of functions {name!r} is known; {near(str(name), _makers)}")
    if not isinstance(numbers, Mapping):
        raise SettingError(f"{name}: give its numbers by name, not {numbers!r}")
    known = inspect.signature(_makers[name]).parameters
    for key in numbers:
        if key not in known:
            raise SettingError(f"{name}: unknown key {key!r}; {near(str(key), known)}")
    try:
        return _makers[name](**numbers)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise SettingError(f"{name}: {error}") from None


def describe(function: Any) -> Any:
    """What a file calls a function, so that `find` gives it back; SettingError if it has no name."""
    for name, known in _named.items():
        if known is function or _essence(known) == _essence(function):
            return name
    if type(function) is Linear:
        return {"linear": _linear_numbers(function)}
    if isinstance(function, Quadratic) and not function.caused:
        return {"quadratic": {"coefficients": function.coefficients.tolist()}}
    raise SettingError(
        f"the function {function!r} has no name that a file could call it by; give it one by "
        'pcnet.register("name", function)'
    )


def _essence(function: Any) -> Any:
    """What makes functions the same; a plain function is the same as one that was derived from it."""
    if isinstance(function, TracedFunction) and isinstance(function.function, WithCauses):
        return (function.function.function, None, None, None)
    return function.identity_key if isinstance(function, Function) else (function, None, None, None)


def _linear_numbers(function: Linear) -> dict[str, Any]:
    if function.matrix is None:
        numbers: dict[str, Any] = {"dim": function.dim}
    else:
        own = min(function.out, function.dim - 1) if function.caused else function.dim  # how it is split is no matter
        numbers = {"matrix": function.matrix[:, :own].tolist()}
        if function.caused:
            numbers["causes"] = function.matrix[:, own:].tolist()
    if bool(function.offset.any()):
        numbers["offset"] = function.offset.tolist()
    return numbers


def near(name: str, known: Any) -> str:
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {found[0]!r}?" if found else f"there is: {', '.join(sorted(map(str, known)))}"

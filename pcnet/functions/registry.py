"""Registry of the functions that model files refer to by name. Reading a file imports nothing."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from pcnet.errors import SettingError, suggestion
from pcnet.functions import systems
from pcnet.functions.base import Function
from pcnet.functions.closed_form import Identity, Linear, Quadratic
from pcnet.functions.traced import TracedFunction, WithCauses, WithTime
from pcnet.settings import finite, to_tensor

F = TypeVar("F", bound=Callable[..., Any])

FUNCTIONS: dict[str, Any] = {
    "identity": Identity(),
    "lorenz": systems.lorenz,
    "lotka_volterra": systems.lotka_volterra,
    "van_der_pol": systems.van_der_pol,
    "lorenz96": systems.lorenz96,
}
"""All named functions; those of the package cannot be replaced."""
PREDEFINED = frozenset(FUNCTIONS)
FACTORIES: dict[str, Callable[..., Any]] = {
    "linear": Linear,
    "quadratic": Quadratic,
    "lotka_volterra_of": systems.LotkaVolterra,
    "lorenz_of": systems.Lorenz,
}
"""Classes that make a function from numbers, by name: {"linear": {"matrix": [[…]]}}."""


@overload
def register(name: str, function: F) -> F: ...
@overload
def register(name: str, function: None = None) -> Callable[[F], F]: ...


def register(name: str, function: F | None = None) -> F | Callable[[F], F]:
    """Give a function a name for model files: `register("spring", f)`, or as a decorator, `@register("spring")`.

    Registering a name again replaces its function, so that notebook cells can be run twice.

    Args:
        name: Printable text that no function of the package has.
        function: A flow or mapping f(state, parameters), or an autocorrelation.
    """
    if not isinstance(name, str) or not name.isprintable() or not name:
        raise SettingError(f"the name of a function must be printable text, not {name!r}")

    def keep(given: F) -> F:
        if not callable(given):
            raise SettingError(f"{name!r}: {given!r} is not a function")
        if name in PREDEFINED or name in FACTORIES:
            raise SettingError(f"{name!r} is a function that comes with pcnet; choose another name")
        FUNCTIONS[name] = given
        return given

    return keep if function is None else keep(function)


def from_spec(spec: Any) -> Any:
    """The function of a file entry: a registered name, or {factory: {argument: numbers}}."""
    if isinstance(spec, str):
        if spec not in FUNCTIONS:
            raise SettingError(
                f"no function {spec!r} is registered by pcnet.register; {suggestion(spec, FUNCTIONS)}. On the command "
                "line, --functions file.py runs the file that registers it"
            )
        return FUNCTIONS[spec]
    if not isinstance(spec, Mapping) or len(spec) != 1:
        raise SettingError(f"a function is a registered name or {{factory: {{argument: numbers}}}}, not {spec!r}")
    ((name, arguments),) = spec.items()
    if name not in FACTORIES:
        raise SettingError(f"there is no function factory {name!r}; {suggestion(name, FACTORIES)}")
    if not isinstance(arguments, Mapping):
        raise SettingError(f"{name}: give a mapping from arguments to numbers, not {arguments!r}")
    known = inspect.signature(FACTORIES[name]).parameters
    for key in arguments:
        if key not in known:
            raise SettingError(f"{name}: unknown key {key!r}; {suggestion(key, known)}")
    try:
        plain = (int, float, type(None))
        return FACTORIES[name](**{k: v if isinstance(v, plain) else finite(to_tensor(v)) for k, v in arguments.items()})
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise SettingError(f"{name}: {error}") from None


def to_spec(function: Any) -> Any:
    """The file entry of a function, the inverse of `from_spec`; SettingError if it has no name."""
    for name, known in FUNCTIONS.items():
        if known is function or _key(known) == _key(function):
            return name
    if type(function) is Linear:
        return {"linear": _linear_arguments(function)}
    if isinstance(function, Quadratic) and not function.takes_causes:
        return {"quadratic": {"coefficients": function.coefficients.tolist()}}
    raise SettingError(f'the function {function!r} has no name; name it by pcnet.register("name", function)')


def _key(function: Any) -> Any:
    """Identity key; a Python function has that of a `TracedFunction` made from it without options."""
    if isinstance(function, TracedFunction) and isinstance(function.function, (WithCauses, WithTime)):
        return (function.function.function, None, None, None)
    return function.identity_key if isinstance(function, Function) else (function, None, None, None)


def _linear_arguments(function: Linear) -> dict[str, Any]:
    if function.matrix is None:
        arguments: dict[str, Any] = {"dim": function.dim}
    else:  # any split of the columns into state and causes makes the same function
        split = min(function.out, function.dim - 1) if function.takes_causes else function.dim
        arguments = {"matrix": function.matrix[:, :split].tolist()}
        if function.takes_causes:
            arguments["causes"] = function.matrix[:, split:].tolist()
    if bool(function.offset.any()):
        arguments["offset"] = function.offset.tolist()
    return arguments

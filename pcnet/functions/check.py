"""Check of a flow or mapping before a run, by calling it once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pcnet.errors import GraphError
from pcnet.functions.base import Function
from pcnet.functions.closed_form import Identity
from pcnet.functions.traced import TracedFunction, WithCauses, WithTime


def check_function(what: str, function: Function, dim: int, parameters: int, out: int | None, like: Tensor) -> int:
    """The number of outputs of a function, after checking it by a call with a small batch; `GraphError` if it fails.

    what: name of the function in errors, such as "the flow of 'x'". dim: size of its state, causes included. out:
    number of outputs that it must have, None for any. like: a tensor with the dtype and device of the run.
    """
    wanted = function.parameters
    if wanted is not None and wanted != parameters:
        raise GraphError(
            f"{what} takes {wanted} parameters and is given {parameters}; give it {wanted} in all (in a graph by "
            "graph.parametrises(ParameterNode(...), ...))"
        )
    # a batch size that equals no other size, so that batch and state dimensions cannot be mixed up unnoticed
    plain = function.function if isinstance(function, TracedFunction) else None
    split = plain.dim if isinstance(plain, (WithCauses, WithTime)) else dim
    batch = min({3, 4, 5, 6, 7, 8} - {dim, parameters, out, split, dim - split})
    x = torch.linspace(0.1, 0.9, batch * dim, dtype=like.dtype, device=like.device).view(batch, dim)
    theta = torch.linspace(0.2, 0.8, batch * parameters, dtype=like.dtype, device=like.device).view(batch, parameters)
    value = _call(what, function, x, theta)
    shape = tuple(value.shape) if isinstance(value, Tensor) else None
    if shape is None or len(shape) != 2 or shape[0] != batch or out not in (None, shape[1]):
        if isinstance(function, Identity):
            raise GraphError(
                f"{what} is the identity by default, which cannot turn {dim} dimensions into {out}; give a mapping: "
                "graph.predicts(..., via=lambda x, theta: ...)"
            )
        got: object = shape
        remedy = "index the last dimension (x[..., 0]) and stack along it (torch.stack([...], -1))"
        if shape is None:
            got = "nothing" if value is None else f"{type(value).__name__} instead of a tensor"
            remedy = "end it by return torch.stack([...], -1), not by numpy or a list"
        raise GraphError(
            f"{what} must turn a batch of states ({batch}, {dim}) into ({batch}, {'channels' if out is None else out}),"
            f" but it returned {got}; {remedy}"
            f"{'. Its arguments are (state, causes or inputs, parameters), in this order' if split != dim else ''}"
        )
    if value.dtype != like.dtype:
        raise GraphError(
            f"{what} returns {value.dtype} for a state of {like.dtype}: leave out .float(), and give constants the "
            "dtype of the state, torch.tensor([...], dtype=x.dtype) or x.new_tensor([...])"
        )
    if not torch.allclose(_call(what, function, x, theta), value, equal_nan=True):
        raise GraphError(
            f"{what} is random, or changes from one call to the next: leave out its noise, which is a setting of the "
            "model (process_noise_sd=, PrecisionNode)"
        )
    alone = _call(what, function, x[2:3], theta[2:3])
    if tuple(alone.shape) != (1, shape[1]) or not torch.allclose(alone[0], value[2], equal_nan=True):
        raise GraphError(f"{what} mixes batch elements: its value for a state must not depend on the rest of the batch")
    return shape[1]


def is_finite_below_zero(function: Function, dim: int, parameters: int, like: Tensor) -> bool:
    """Whether a function is finite at negative states, as a logarithm, a root or a power is not."""
    x = torch.linspace(-0.9, -0.1, 8 * dim, dtype=like.dtype, device=like.device).view(8, dim)
    theta = torch.linspace(0.2, 0.8, 8 * parameters, dtype=like.dtype, device=like.device).view(8, parameters)
    return bool(torch.isfinite(_call("a function", function, x, theta)).all())


def output_size(function: Function, dim: int, parameters: int, what: str = "the mapping") -> int:
    """The number of outputs of a function of a state (dim,) and parameters (p,), found by calling it."""
    return check_function(what, function, dim, parameters, None, torch.empty(0, dtype=torch.float64))


def _call(what: str, function: Function, x: Tensor, theta: Tensor) -> Tensor:
    with torch.inference_mode(False):  # where tensors count their changes
        given = x.clone(), theta.clone()
    versions = [each._version for each in given]
    try:
        with torch.no_grad(), _SlicesInRange(what, x.shape[0], theta):
            found = function(*given)
    except GraphError as error:
        raise GraphError(str(error) if what in str(error) else f"{what}: {error}") from None
    except Exception as error:
        remedy = ""
        if "dtype" in str(error):
            remedy = ". Constants must have the dtype of the state: torch.tensor([...], dtype=x.dtype), or x.new_tensor"
        elif "ambiguous" in str(error) or "Python scalars" in str(error):
            remedy = (
                ". It is called with many states at once: use torch.where instead of if, torch.sin instead of math.sin"
            )
        elif isinstance(error, IndexError) and not theta.shape[-1]:
            remedy = (
                ". It is given no parameters: if it has some, give parameter_mean=[...] and parameter_sd=..., in a "
                "graph graph.parametrises(ParameterNode(...), ...)"
            )
        elif "positional argument" in str(error):
            remedy = ". A function without parameters takes the argument too: def f(x, _)"
        raise GraphError(
            f"{what} failed when called with a state of shape {tuple(x.shape)} and parameters of shape "
            f"{tuple(theta.shape)}, both {x.dtype}: {type(error).__name__}: {error}. It is called as f(x, theta), "
            f"with causes as f(x, v, theta), and with the time as f(x, v, theta, t){remedy}"
        ) from error
    if [each._version for each in given] != versions:
        raise GraphError(
            f"{what} changes its arguments in place (x.mul_(2), x[..., 0] = …): write 2 * x, or torch.stack"
        )
    return found


class _SlicesInRange(TorchFunctionMode):
    """Refuses slices of batched values (B, n) beyond n: torch shortens them, and what is left may broadcast."""

    def __init__(self, what: str, batch: int, theta: Tensor) -> None:
        super().__init__()
        self.what, self.batch, self.n_parameters = what, batch, theta.shape[-1]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__ and args[0].dim() == 2 and args[0].shape[0] == self.batch:
            self._check(args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
        return func(*args, **(kwargs or {}))

    def _check(self, value: Tensor, index: tuple[Any, ...]) -> None:
        full = len(index) == 2 and (index[0] is Ellipsis or index[0] == slice(None))
        last, n = index[-1], value.shape[-1]
        if not full or not isinstance(last, slice):
            return
        ends = [each for each in (last.start, last.stop) if isinstance(each, int)]
        if any(each > n or each < -n for each in ends):
            asked = ":".join("" if each is None else str(each) for each in (last.start, last.stop))
            raise GraphError(
                f"{self.what} takes [..., {asked}] of a value of size {n}, where torch gives fewer elements without a "
                f"word. It is given {self.n_parameters} parameters: give as many as it takes (parameter_mean=[...], in "
                "a graph ParameterNode(mean=[...])), or a slice that fits"
            )

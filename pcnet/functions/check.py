"""Checks a flow or mapping once, before a run."""

from __future__ import annotations

import torch
from torch import Tensor

from pcnet.errors import GraphError
from pcnet.functions.base import Function
from pcnet.functions.closed_form import Identity


def check_function(what: str, function: Function, dim: int, parameters: int, out: int | None, like: Tensor) -> int:
    """Call a function once with a batch of three and refuse it, in words, if it does not give (3, out); returns out.

    like: a tensor of the dtype and device of the run.
    """
    wanted = function.parameters
    if wanted is not None and wanted != parameters:
        raise GraphError(
            f"{what} takes {wanted} parameters and is given {parameters}; give it {wanted} in all (in a graph by "
            "graph.parametrises(ParameterNode(...), ...))"
        )
    x = torch.linspace(0.1, 0.9, 3 * dim).to(like).view(3, dim)
    theta = torch.linspace(0.2, 0.8, 3 * parameters).to(like).view(3, parameters)
    with torch.no_grad():
        try:
            value = function(x, theta)
        except Exception as error:
            raise GraphError(
                f"{what} failed when called with a state of shape (3, {dim}) and parameters of shape "
                f"(3, {parameters}), both {like.dtype}: {type(error).__name__}: {error}. It is called as f(x, theta), "
                "and with causes as f(x, v, theta)"
            ) from error
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        if shape is None or len(shape) != 2 or shape[0] != 3 or out not in (None, shape[1]):
            if isinstance(function, Identity):
                raise GraphError(
                    f"{what} is the identity, unless given, and cannot turn {dim} dimensions into {out}; say how by "
                    "graph.predicts(..., via=lambda x, theta: ...)"
                )
            got = type(value).__name__ if shape is None else shape
            raise GraphError(
                f"{what} must turn a batch of states (3, {dim}) into (3, {'channels' if out is None else out}), but it "
                f"returned {got}; index the last dimension (x[..., 0]) and stack along it (torch.stack([...], -1))"
            )
        alone = function(x[2:], theta[2:])
        if tuple(alone.shape) != (1, shape[1]) or not torch.allclose(alone[0], value[2], equal_nan=True):
            raise GraphError(f"{what} mixes batch elements: a state alone and the same state in a batch must agree")
    return shape[1]

"""Derivatives of functions of generalised states by autograd, written out from the definition."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import hessian, jacrev, jvp, vmap

from pcnet.functions.base import Function, subtract_contracted_hessian

F64, F32 = torch.float64, torch.float32
Plain = Callable[[Tensor, Tensor], Tensor]


def lifted(plain: Plain, rows: int) -> Plain:
    """f̃(x̃, θ), (orders, dim), (p,) → (rows, out): f of the value, and J times every motion."""

    def f(x: Tensor, theta: Tensor) -> Tensor:
        rest = [jvp(lambda v: plain(v, theta), (x[0],), (x[i],))[1] for i in range(1, rows)]
        return torch.stack([plain(x[0], theta), *rest])

    return f


class Derivatives(NamedTuple):
    value: Tensor
    slope: Tensor
    hessian: Tensor
    parameter_slope: Tensor
    parameter_hessian: Tensor


def expect(plain: Plain, x: Tensor, theta: Tensor, weights: Tensor) -> Derivatives:
    """f̃ and its derivatives by autograd in float64, of every batch element."""
    x, theta, weights = x.to(F64), theta.to(F64), weights.to(F64)
    f = lifted(plain, weights.shape[1])

    def weighted(x: Tensor, theta: Tensor, weights: Tensor) -> Tensor:
        return (weights * f(x, theta)).sum()

    batch, n = x.shape[0], x.shape[1] * x.shape[2]
    value = vmap(f)(x, theta)
    slope = vmap(jacrev(f, 0))(x, theta)
    contracted_hessian = vmap(hessian(weighted, 0))(x, theta, weights)
    if theta.shape[-1]:
        along = vmap(jacrev(f, 1))(x, theta)
        theta_hessian = vmap(hessian(weighted, 1))(x, theta, weights)
    else:
        along, theta_hessian = value.new_zeros(*value.shape, 0), value.new_zeros(batch, 0, 0)
    return Derivatives(
        value, slope.reshape(batch, -1, n), contracted_hessian.reshape(batch, n, n), along, theta_hessian
    )


def close(ours: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == dtype
    assert ours.shape == expected.shape
    if expected.numel():
        tolerance = 2e3 * torch.finfo(dtype).eps * (1 + expected.abs().max())
        assert (ours.to(F64) - expected).abs().max() < tolerance


def agree(function: Function, plain: Plain, x: Tensor, theta: Tensor, weights: Tensor) -> None:
    """All that a function offers agrees with autograd."""
    rows, dtype = weights.shape[1], x.dtype
    batch, orders, dim = x.shape
    expected = expect(plain, x, theta, weights)
    close(function(x[:, 0], theta), expected.value[:, 0], dtype)
    line = function.linearise(x, theta, rows)
    close(line.value, expected.value, dtype)
    close(line.slope, expected.slope, dtype)
    close(function.parameter_slope(x, theta, rows), expected.parameter_slope, dtype)
    contracted_hessian = function.contracted_hessian(x, theta, weights)
    if contracted_hessian is None:
        assert not expected.hessian.any()
    else:
        close(contracted_hessian, expected.hessian.view(batch, orders, dim, orders, dim)[:, :rows, :, 0], dtype)
        whole = torch.zeros(batch, orders, dim, orders, dim, dtype=dtype)  # zero but for that column and its transpose
        for i in range(rows):
            whole[:, i, :, 0] = contracted_hessian[:, i]
            whole[:, 0, :, i] = contracted_hessian[:, i].mT
        close(whole.view(batch, orders * dim, -1), expected.hessian, dtype)
        some = torch.arange(orders * dim, dtype=dtype).expand(batch, orders * dim, -1)
        close(subtract_contracted_hessian(some, contracted_hessian), some - expected.hessian, dtype)
    parameter_hessian = function.parameter_contracted_hessian(x, theta, weights)
    if parameter_hessian is None:
        assert not expected.parameter_hessian.any()
    else:
        close(parameter_hessian, expected.parameter_hessian, dtype)

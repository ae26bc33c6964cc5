"""Neural networks as flows or mappings: the weights are the parameters."""

import copy
import math

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from pcnet.errors import GraphError, SettingError
from pcnet.functions.base import Function, PlainFunction
from pcnet.functions.traced import TracedFunction, as_function


class Network(TracedFunction):
    """f(x, θ) = module(x), or known(x) + module(x), with θ the weights of a torch module.

    θ (..., p) holds the weights in the order of `module.named_parameters()`, each flattened row by row. Every batch
    element has its own weights. Weights with requires_grad=False stay fixed.

    Args:
        module: A module of one state (dim,), without buffers. It is copied.
        known: The known part of f, a function of (state, its own parameters). If it is a `Function` with a number of
            parameters, these come before the weights: attach their parameter node first.
    """

    def __init__(self, module: nn.Module, known: Function | PlainFunction | None = None) -> None:
        self.known = None if known is None else as_function(known)
        self.module = copy.deepcopy(_checked(module)).requires_grad_(False)
        learned = [name for name, weight in module.named_parameters() if weight.requires_grad]
        weights = dict(self.module.named_parameters())
        self._shapes = {name: weights.pop(name).shape for name in learned}
        self._fixed = weights
        self._first = 0 if self.known is None else self.known.parameters or 0
        self.initial = self.weights_of(self.module)
        """The weights of the given module, (p,); use as the prior mean of the `ParameterNode`."""
        super().__init__(self._value, None, self._parameter_jacobian, self._first + len(self.initial))

    def __repr__(self) -> str:
        layers = [type(layer).__name__ for layer in self.module.modules() if not list(layer.children())]
        known = "" if self.known is None else f"{self.known!r} + "
        return f"{known}Network({', '.join(layers)}; {len(self.initial)} weights)"

    def weights_of(self, module: nn.Module) -> Tensor:
        """The weights of a module of the same architecture as a float64 vector, (p,)."""
        found = dict(module.named_parameters())
        return torch.cat([found[name].detach().reshape(-1).to(torch.float64) for name in self._shapes])

    def module_with(self, weights: Tensor) -> nn.Module:
        """A copy of the module with the given weights (p,), without the parameters of the known part."""
        weights = torch.as_tensor(weights, dtype=torch.float64)
        if tuple(weights.shape) != tuple(self.initial.shape):
            raise SettingError(
                f"{self!r}: the weights of a module have shape {tuple(self.initial.shape)}, not "
                f"{tuple(weights.shape)}; choose one batch element, and leave out the parameters of the known part"
            )
        made = copy.deepcopy(self.module)
        found = dict(made.named_parameters())
        with torch.inference_mode(False), torch.no_grad():
            for name, value in self._named(weights).items():
                found[name].copy_(value)
                found[name].requires_grad_(True)
        return made

    def _named(self, weights: Tensor) -> dict[str, Tensor]:
        """A weight vector (p,) as weights by name."""
        parts = torch.split(weights, [math.prod(shape) for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def _value(self, x: Tensor, parameters: Tensor) -> Tensor:
        if parameters.shape[-1] != self.parameters:
            raise GraphError(f"{self!r} takes {self.parameters} parameters, not {parameters.shape[-1]}")
        fixed = {name: weight.to(x) for name, weight in self._fixed.items()}

        def one(x: Tensor, weights: Tensor) -> Tensor:
            made: Tensor = functional_call(self.module, self._named(weights) | fixed, (x,))
            return made

        flat = parameters[..., self._first :].reshape(-1, len(self.initial))
        value: Tensor = vmap(one)(x.reshape(-1, x.shape[-1]), flat)
        value = value.view(*x.shape[:-1], -1)
        return value if self.known is None else value + self.known(x, parameters[..., : self._first])

    def _parameter_jacobian(self, x: Tensor, parameters: Tensor) -> Tensor:
        """∂f/∂θ (..., out, p) by reverse mode, because there are far fewer outputs than weights."""
        out = self._value(x, parameters).shape[-1]
        copies, weights = (v.expand(out, *v.shape) for v in (x, parameters))
        value, pullback, *_ = vjp(lambda theta: self._value(copies, theta), weights.contiguous())
        units = torch.eye(out, dtype=x.dtype, device=x.device).view(out, *(1,) * (x.dim() - 1), out)
        slope: Tensor = pullback(units.expand_as(value).contiguous())[0]
        return slope.movedim(0, -2)


def _checked(module: nn.Module) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise SettingError(f"Network: give a torch.nn.Module, not {module!r}")
    name = type(module).__name__
    if not any(weight.requires_grad for weight in module.parameters()):
        raise SettingError(f"Network: {name} has no weights to learn; use the module itself as flow or mapping")
    for part, layer in module.named_modules():
        if next(layer.buffers(recurse=False), None) is not None:
            raise SettingError(
                f"Network: {part or name} ({type(layer).__name__}) has buffers, such as running means, which are "
                "neither parameters nor states; use a layer without buffers (LayerNorm instead of BatchNorm)"
            )
        if layer.training and isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            raise SettingError(f"Network: {part or name} drops values at random; call module.eval(), or leave it out")
    return module

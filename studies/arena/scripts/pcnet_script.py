"""FitzHugh–Nagumo neuron, potential seen, parameters and noise unknown: pcnet."""

import sys

import numpy as np
import torch

from pcnet.graphs import adaptive_filter


def neuron(x, p):
    v, w = x.unbind(-1)
    return torch.stack([v - v**3 / 3 - w + p[..., 0], p[..., 1] * (v + 0.7 - 0.8 * w)], -1)


y = np.load(sys.argv[1])
model = adaptive_filter(
    neuron,
    dim=2,
    dt=0.2,
    mapping=lambda x, _: x[..., :1],
    parameter_mean=[0.3, 0.12],
    parameter_sd=[0.3, 0.05],
    initial_mean=[0.0, 0.0],
    initial_sd=0.5,
)
result = model.run(y, progress=False)
print(result.mean("x")[-1], result.sd("x")[-1], result.mean("theta")[-1])

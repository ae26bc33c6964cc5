"""FitzHugh–Nagumo neuron, potential seen, parameters and noise unknown: cuthbert, noise by maximum likelihood."""

import sys

import cuthbert
import jax
import jax.numpy as jnp
import numpy as np
from cuthbert.gaussian import moments
from scipy.optimize import minimize

jax.config.update("jax_enable_x64", True)
y = jnp.asarray(np.load(sys.argv[1]))
dt = 0.2


def neuron(x, p):
    return jnp.stack([x[0] - x[0] ** 3 / 3 - x[1] + p[0], p[1] * (x[0] + 0.7 - 0.8 * x[1])])


def step(z):
    x, p, h = z[:2], z[2:], dt / 2
    for _ in range(2):
        k1 = neuron(x, p)
        k2 = neuron(x + 0.5 * h * k1, p)
        k3 = neuron(x + 0.5 * h * k2, p)
        k4 = neuron(x + h * k3, p)
        x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return jnp.concatenate([x, p])


def run(logs, y):
    root_x = jnp.diag(jnp.concatenate([jnp.sqrt(dt) * jnp.exp(logs[:2]), jnp.zeros(2)]))
    root_y = jnp.exp(logs[2:])[:, None]
    filtering = moments.build_filter(
        jnp.array([0.0, 0.0, 0.3, 0.12]),
        jnp.diag(jnp.array([0.5, 0.5, 0.3, 0.05])),
        lambda state, _: (lambda z: (step(z), root_x), state.mean),
        lambda state, now: (lambda z: (z[:1], root_y), state.mean, now),
    )
    return cuthbert.filter(filtering, y, filtering.init_prepare())


loss = jax.jit(jax.value_and_grad(lambda logs: -run(logs, y[: len(y) // 3]).log_normalizing_constant[-1]))
start = np.log([0.15, 0.15, np.diff(y[:, 0]).std() / np.sqrt(2)])
levels = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 30}).x
found = jax.jit(run)(levels, y)
print(found.mean[-1], jnp.sqrt((found.chol_cov[-1] ** 2).sum(-1)))

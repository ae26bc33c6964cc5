"""FitzHugh–Nagumo neuron, potential seen, parameters and noise unknown: dynamax, noise by maximum likelihood."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from dynamax.nonlinear_gaussian_ssm import ParamsNLGSSM, UKFHyperParams, unscented_kalman_filter
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
    params = ParamsNLGSSM(
        initial_mean=jnp.array([0.0, 0.0, 0.3, 0.12]),
        initial_covariance=jnp.diag(jnp.array([0.5, 0.5, 0.3, 0.05]) ** 2),
        dynamics_function=step,
        dynamics_covariance=jnp.diag(jnp.concatenate([dt * jnp.exp(2 * logs[:2]), jnp.zeros(2)])),
        emission_function=lambda z: z[:1],
        emission_covariance=jnp.exp(2 * logs[2:])[:, None],
    )
    return unscented_kalman_filter(params, y, UKFHyperParams())


loss = jax.jit(jax.value_and_grad(lambda logs: -run(logs, y[: len(y) // 3]).marginal_loglik))
start = np.log([0.15, 0.15, np.diff(y[:, 0]).std() / np.sqrt(2)])
levels = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 30}).x
found = jax.jit(run)(levels, y)
sd = jnp.sqrt(jnp.diag(found.filtered_covariances[-1]))
print(found.filtered_means[-1], sd)

"""Microseconds per observation of both engines, beside extended Kalman filters in the same run.

Run:  python examples/benchmark.py            (make bench)
One thread. The reference is an extended Kalman filter in numpy with the parameters in its state: it tracks states and
learns parameters, but is told the noise and has no free energy. filterpy and dynamax are timed if they are installed.
Each number is the minimum of several passes, because other load only adds time.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import pcnet as pc
from pcnet.graphs import Level, adaptive_filter, hierarchy, odem

Array = NDArray[np.float64]
SAMPLES, STEPS, FEW, BATCH = 10_000, 1000, 60, 756


def process(samples: int) -> Array:
    """The paper's Lotka–Volterra process with white noise, (samples, 3)."""
    rng = np.random.default_rng(0)
    interaction = np.array([[0.0, 0.2, -0.4], [-0.2, 0.0, 0.1], [0.4, -0.1, 0.0]])
    x, rows = 5 * np.array([0.45, 0.22, 0.33]), []
    for _ in range(samples):
        rows.append(x + 0.1 * rng.normal(size=3))
        x = np.clip(x + 0.01 * (x * (interaction @ x) + 0.05 * rng.normal(size=3)), 0, 5)
    return np.array(rows)


def lotka_volterra(x: Array, a: Array) -> tuple[Array, Array, Array]:
    """The flow and its Jacobians with respect to state and parameters."""
    matrix = np.array([[0, a[0], a[1]], [-a[0], 0, a[2]], [-a[1], -a[2], 0]])
    growth = matrix @ x
    jacobian_theta = np.array(
        [[x[0] * x[1], x[0] * x[2], 0], [-x[0] * x[1], 0, x[1] * x[2]], [0, -x[0] * x[2], -x[1] * x[2]]]
    )
    return x * growth, np.diag(growth) + x[:, None] * matrix, jacobian_theta


def kalman(observations: Array, flow: Callable[..., tuple[Array, Array, Array]], prior: Array, sd: float) -> Array:
    """Extended Kalman filter of states and parameters; returns the last mean."""
    dt, n, p = 0.01, 3, len(prior)
    mean = np.concatenate([observations[0], prior])
    covariance = np.diag([0.01] * n + [sd**2] * p)
    Q = np.diag([(dt * 0.05) ** 2] * n + [0.0] * p)
    R, eye = 0.01 * np.eye(n), np.eye(n + p)
    for y in observations:
        velocity, jacobian, jacobian_theta = flow(mean[:n], mean[n:])
        F = eye.copy()
        F[:n, :n] += dt * jacobian
        F[:n, n:] = dt * jacobian_theta
        mean[:n] += dt * velocity
        covariance = F @ covariance @ F.T + Q
        gain = np.linalg.solve(covariance[:n, :n] + R, covariance[:n]).T
        mean = mean + gain @ (y - mean[:n])
        covariance = covariance - gain @ covariance[:n]
    return mean


def settings(batch: int) -> dict[str, torch.Tensor]:
    """`batch` of the paper's 756 settings at one order, evenly spaced."""
    axes = (
        torch.tensor([10.0, 20, 50, 500, 5000, 12500, 25000]),
        torch.tensor([1.0, 0.5, 0.25]),
        torch.tensor([64.0, 128, 256, 512]),
        torch.tensor([0.0, 0.1, 0.2]),
        torch.tensor([0.0, 0.1, 0.2]),
    )
    names = ("expected_precision_y", "kappa", "every", "beta_lambda", "beta_theta")
    grid = torch.cartesian_prod(*axes).double()
    chosen = torch.linspace(0, len(grid) - 1, batch).long()
    return {name: grid[chosen, i] for i, name in enumerate(names)}


def tracking(**options: Any) -> pc.Model:
    """The adaptive filter: states, three parameters and the noise, all learned."""
    return adaptive_filter(
        pc.systems.lotka_volterra, 3, 0.01, parameter_mean=[0.3, -0.2, 0.3], parameter_sd=0.25, **options
    )


def two_levels() -> pc.Model:
    """A slow state above the parameters of the adaptive filter."""
    above = Level(pc.systems.linear(-0.1 * np.eye(3)), 3, process_noise_sd=0.14)
    below = Level(
        pc.systems.lotka_volterra, 3, parameter_mean=[0.3, -0.2, 0.3], parameter_sd=[0.25] * 3, process_noise_sd=0.1
    )
    return hierarchy(below, above, dt=0.01, every=16)


def ten_species() -> pc.Model:
    """Generalised Lotka–Volterra with ten species, two orders, no parameters to learn."""
    rng = np.random.default_rng(1)
    matrix = torch.as_tensor(0.1 * rng.normal(size=(10, 10)))
    matrix = matrix - matrix.mT

    def flow(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return x * (x @ matrix.mT)

    x = pc.GeneralisedStateNode("x", dim=10, orders=3, flow=flow)
    y = pc.SensoryNode("y", dim=10, orders=2, dt=0.01)
    graph = pc.Graph()
    graph.predicts(x, y)
    for node in (x, y):
        graph.weighs(
            pc.PrecisionNode(f"noise {node.name}", prior_precision=500.0, sd=0.1, correlation_time=0.005), node
        )
    return pc.Model(graph, pc.odem(every=64))


MODELS: dict[str, Callable[[], pc.Model]] = {
    "odem glv, 2 orders": lambda: odem(model="glv", orders=2),
    "odem glv, 3 orders": lambda: odem(model="glv", orders=3),
    "odem lorenz, 2 orders": lambda: odem(model="lorenz", orders=2),
    "odem lorenz, 3 orders": lambda: odem(model="lorenz", orders=3),
    "adaptive filter, white noise": tracking,
    "adaptive filter, smooth noise": lambda: tracking(correlation_time=0.05),
    "two levels": two_levels,
    "glv of 10 species, 3 orders": ten_species,
}
BATCHES: dict[str, Callable[[], pc.Model]] = {
    "odem glv, 2 orders": lambda: odem(model="glv", orders=2, **settings(BATCH)),
    "odem glv, 3 orders": lambda: odem(model="glv", orders=3, **settings(BATCH)),
    "adaptive filter, white noise": lambda: tracking(observation_noise_sd=torch.logspace(0.5, -1, BATCH)[:, None]),
}


def best(timed: dict[str, tuple[Callable[[], object], int]], passes: int) -> dict[str, float]:
    """The smallest time of each, in µs; the table as a whole is repeated, so that other load affects all alike."""
    found = dict.fromkeys(timed, float("inf"))
    for _ in range(passes):
        for name, (run, work) in timed.items():
            started = time.perf_counter()
            run()
            found[name] = min(found[name], (time.perf_counter() - started) / work * 1e6)
    return found


def observed(model: pc.Model, samples: int) -> Array:
    """Observations with as many channels as the model has."""
    channels = model.graph["y"].observation_size
    series = process(samples)
    return np.concatenate([series] * -(-channels // 3), 1)[:, :channels]


def stepped(model: pc.Model, record: Any) -> Callable[[], object]:
    """Single steps of a session that has started."""
    session, series = model.start(engine="compiled", record=record), observed(model, STEPS + 2)
    for y in series[:2]:
        session.step(y)

    def run() -> None:
        for y in series[2:]:
            session.step(y)

    return run


def filterpy_step() -> tuple[Callable[[], object], int] | None:
    """filterpy's extended Kalman filter of states and parameters, if it is installed."""
    try:
        from filterpy.kalman import ExtendedKalmanFilter
    except ImportError:
        return None
    series = process(STEPS)
    H = np.eye(3, 6)

    def run() -> None:
        rival = ExtendedKalmanFilter(dim_x=6, dim_z=3)
        rival.x = np.concatenate([series[0], [0.3, -0.2, 0.3]])
        rival.P, rival.R = np.diag([0.01] * 3 + [0.0625] * 3), 0.01 * np.eye(3)
        rival.Q = np.diag([(0.01 * 0.05) ** 2] * 3 + [0.0] * 3)
        for y in series:
            velocity, jacobian, slope = lotka_volterra(rival.x[:3], rival.x[3:])
            F = np.eye(6)
            F[:3, :3] += 0.01 * jacobian
            F[:3, 3:] = 0.01 * slope
            rival.x = rival.x + np.concatenate([0.01 * velocity, np.zeros(3)])
            rival.P = F @ rival.P @ F.T + rival.Q
            rival.update(y, lambda _: H, lambda x: x[:3])

    return run, STEPS


def dynamax_step() -> tuple[Callable[[], object], int] | None:
    """dynamax's extended Kalman filter of states and parameters under jit, if it is installed."""
    try:
        import jax
        import jax.numpy as jnp
        from dynamax.nonlinear_gaussian_ssm import ParamsNLGSSM, extended_kalman_filter
    except ImportError:
        return None
    jax.config.update("jax_enable_x64", True)

    def dynamics(z: Any) -> Any:
        x, a = z[:3], z[3:]
        matrix = jnp.array([[0.0, a[0], a[1]], [-a[0], 0.0, a[2]], [-a[1], -a[2], 0.0]])
        return jnp.concatenate([x + 0.01 * x * (matrix @ x), a])

    series = jnp.asarray(process(SAMPLES))
    parameters = ParamsNLGSSM(
        initial_mean=jnp.concatenate([series[0], jnp.array([0.3, -0.2, 0.3])]),
        initial_covariance=jnp.diag(jnp.array([0.01] * 3 + [0.0625] * 3)),
        dynamics_function=dynamics,
        dynamics_covariance=jnp.diag(jnp.array([(0.01 * 0.05) ** 2] * 3 + [1e-12] * 3)),
        emission_function=lambda z: z[:3],
        emission_covariance=0.01 * jnp.eye(3),
    )
    jitted = jax.jit(lambda y: extended_kalman_filter(parameters, y).filtered_means)
    jitted(series).block_until_ready()
    return lambda: jitted(series).block_until_ready(), SAMPLES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=int, default=6, help="number of timings; the minimum is shown")
    parser.add_argument("--models", nargs="*", default=list(MODELS), help="rows of the table; all unless given")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="observations of a compiled run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, 1 thread, {platform.processor() or 'cpu'}")
    timed: dict[str, tuple[Callable[[], object], int]] = {
        "numpy": (partial(kalman, process(STEPS), lotka_volterra, np.array([0.3, -0.2, 0.3]), 0.25), STEPS)
    }
    for name, rival in (("filterpy", filterpy_step()), ("dynamax, jit", dynamax_step())):
        if rival is not None:
            timed[name] = rival
    engines: dict[str, str] = {}
    for name in options.models:
        model = MODELS[name]()
        series = observed(model, options.samples)
        found = model.run(series, progress=False)  # compiles
        engines[name] = f"{found.engine}, {found.eager_ticks} eager"
        timed[f"{name}/run"] = partial(model.run, series, progress=False), options.samples
        timed[f"{name}/step"] = stepped(model, ()), STEPS
        timed[f"{name}/recorded step"] = stepped(model, None), STEPS
        few = series[:FEW]
        timed[f"{name}/eager"] = partial(model.run, few, engine="eager", progress=False), FEW
        if name in BATCHES:
            many = BATCHES[name]()
            many.run(series[:150], progress=False, record=("mean", "energy"))
            run = partial(many.run, series[:300], progress=False, record=("mean", "energy"))
            timed[f"{name}/batch"] = run, 300 * BATCH
    costs = best(timed, options.passes)
    reference = costs["numpy"]
    print(
        "µs per observation; in brackets: relative to a step of an extended Kalman filter in numpy, which is told the"
    )
    print(f"noise. batch: per observation and element of {BATCH}. All with their usual recording.\n")
    for name in ("numpy", "filterpy", "dynamax, jit"):
        if name in costs:
            print(f"extended Kalman filter, {name:<14} {costs[name]:8.2f} ({costs[name] / reference:5.2f})")
    columns = ("run", "step", "recorded step", "batch", "eager")
    print(f"\n{'':<30} " + " ".join(f"{column:>16}" for column in columns))
    for name in options.models:
        cells = []
        for column in columns:
            cost = costs.get(f"{name}/{column}")
            cells.append(f"{'':>16}" if cost is None else f"{cost:8.2f} ({cost / reference:5.2f})")
        print(f"{name:<30} " + " ".join(cells) + f"  {engines[name]}")


if __name__ == "__main__":
    main()

"""Other filters on the process of `benchmark.py`, each as its own documentation recommends.

The extended Kalman filters track three states and learn three parameters, but are told the noise. The hierarchical
Gaussian filter of pyhgf has no model of the flow: it tracks each of the three channels as a Gaussian random walk.

    pip install -e ".[arena]"       # filterpy, dynamax and cuthbert
    pip install -e ".[arena-hgf]"   # pyhgf, in an environment of its own: it needs an older jax than cuthbert

`python examples/benchmark.py --pyhgf <its python>` times them all in one run.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SAMPLES, STEPS = 10_000, 1000
DT, PRIOR, PRIOR_SD = 0.01, np.array([0.3, -0.2, 0.3]), 0.25
Q = np.diag([(DT * 0.05) ** 2] * 3 + [0.0] * 3)
R = 0.01 * np.eye(3)
P = np.diag([0.01] * 3 + [PRIOR_SD**2] * 3)


def process(samples: int) -> Array:
    """The paper's Lotka–Volterra process with white noise, (samples, 3)."""
    rng = np.random.default_rng(0)
    interaction = np.array([[0.0, 0.2, -0.4], [-0.2, 0.0, 0.1], [0.4, -0.1, 0.0]])
    x, rows = 5 * np.array([0.45, 0.22, 0.33]), []
    for _ in range(samples):
        rows.append(x + 0.1 * rng.normal(size=3))
        x = np.clip(x + DT * (x * (interaction @ x) + 0.05 * rng.normal(size=3)), 0, 5)
    return np.array(rows)


class Timed(NamedTuple):
    """A filter that is ready, with everything compiled.

    run: One pass; returns the last mean, (6,) of states and parameters or (3,) of states. samples: Observations of it.
    """

    run: Callable[[], Array]
    samples: int


def lotka_volterra(x: Array, a: Array) -> tuple[Array, Array, Array]:
    """The flow and its Jacobians with respect to state and parameters."""
    matrix = np.array([[0, a[0], a[1]], [-a[0], 0, a[2]], [-a[1], -a[2], 0]])
    growth = matrix @ x
    jacobian_theta = np.array(
        [[x[0] * x[1], x[0] * x[2], 0], [-x[0] * x[1], 0, x[1] * x[2]], [0, -x[0] * x[2], -x[1] * x[2]]]
    )
    return x * growth, np.diag(growth) + x[:, None] * matrix, jacobian_theta


def kalman(observations: Array) -> Array:
    """Extended Kalman filter of states and parameters in numpy; returns the last mean, (6,)."""
    mean, covariance, eye = np.concatenate([observations[0], PRIOR]), P, np.eye(6)
    for y in observations:
        velocity, jacobian, jacobian_theta = lotka_volterra(mean[:3], mean[3:])
        F = eye.copy()
        F[:3, :3] += DT * jacobian
        F[:3, 3:] = DT * jacobian_theta
        mean[:3] += DT * velocity
        covariance = F @ covariance @ F.T + Q
        gain = np.linalg.solve(covariance[:3, :3] + R, covariance[:3]).T
        mean = mean + gain @ (y - mean[:3])
        covariance = covariance - gain @ covariance[:3]
    return mean


def numpy_filter() -> Timed:
    series = process(STEPS)
    return Timed(lambda: kalman(series), STEPS)


def filterpy_filter() -> Timed:
    """A subclass that overrides `predict_x`, with the Jacobian of the flow as F before each step."""
    from filterpy.kalman import ExtendedKalmanFilter

    class Tracker(ExtendedKalmanFilter):
        def predict_x(self, u: Any = 0) -> None:
            velocity, jacobian, jacobian_theta = lotka_volterra(self.x[:3], self.x[3:])
            self.F = np.eye(6)
            self.F[:3, :3] += DT * jacobian
            self.F[:3, 3:] = DT * jacobian_theta
            self.x = self.x + np.concatenate([DT * velocity, np.zeros(3)])

    series, H = process(STEPS), np.eye(3, 6)

    def run() -> Array:
        tracker = Tracker(dim_x=6, dim_z=3)
        tracker.x, tracker.P, tracker.R, tracker.Q = np.concatenate([series[0], PRIOR]), P.copy(), R, Q
        for y in series:
            tracker.predict()
            tracker.update(y, lambda _: H, lambda x: x[:3])
        return np.asarray(tracker.x)

    return Timed(run, STEPS)


def _one_thread() -> None:
    """Let jax use one thread, if it is not imported yet."""
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")


def _jax() -> Any:
    """jax in double precision."""
    _one_thread()
    import jax

    jax.config.update("jax_enable_x64", True)
    return jax


def _dynamics(z: Any) -> Any:
    """One Euler step of states and parameters in jax, (6,) → (6,)."""
    import jax.numpy as jnp

    x, a = z[:3], z[3:]
    matrix = jnp.array([[0.0, a[0], a[1]], [-a[0], 0.0, a[2]], [-a[1], -a[2], 0.0]])
    return jnp.concatenate([x + DT * x * (matrix @ x), a])


def dynamax_filter() -> Timed:
    """`extended_kalman_filter` under jit."""
    jax = _jax()
    import jax.numpy as jnp
    from dynamax.nonlinear_gaussian_ssm import ParamsNLGSSM, extended_kalman_filter

    series = jnp.asarray(process(SAMPLES))
    parameters = ParamsNLGSSM(
        initial_mean=jnp.concatenate([series[0], PRIOR]),
        initial_covariance=jnp.asarray(P),
        dynamics_function=_dynamics,
        dynamics_covariance=jnp.asarray(Q),
        emission_function=lambda z: z[:3],
        emission_covariance=jnp.asarray(R),
    )
    jitted = jax.jit(lambda y: extended_kalman_filter(parameters, y).filtered_means)

    def run() -> Array:
        return np.asarray(jitted(series)[-1])

    run()
    return Timed(run, SAMPLES)


def _cuthbert() -> Any:
    """The filter that linearises conditional means, which is an extended Kalman filter in square-root form."""
    import jax.numpy as jnp
    from cuthbert.gaussian import moments

    mean = jnp.asarray(np.concatenate([process(1)[0], PRIOR]))
    roots = [jnp.asarray(np.sqrt(each)) for each in (P, Q, R)]  # of diagonal matrices

    def dynamics(state: Any, _: Any) -> Any:
        return (lambda z: (_dynamics(z), roots[1])), state.mean

    def observation(state: Any, y: Any) -> Any:
        return (lambda z: (z[:3], roots[2])), state.mean, y

    return moments.build_filter(mean, roots[0], dynamics, observation)


def cuthbert_filter() -> Timed:
    """`cuthbert.filter` over all observations, under jit."""
    jax = _jax()
    import cuthbert
    import jax.numpy as jnp

    built, series = _cuthbert(), jnp.asarray(process(SAMPLES))
    jitted = jax.jit(lambda y: cuthbert.filter(built, y, built.init_prepare()).mean)

    def run() -> Array:
        return np.asarray(jitted(series)[-1])

    run()
    return Timed(run, SAMPLES)


def cuthbert_steps() -> Timed:
    """One observation at a time: `filter_prepare` and `filter_combine` under jit."""
    jax = _jax()
    built, series = _cuthbert(), process(STEPS)
    start = built.init_prepare()
    step = jax.jit(lambda state, y: built.filter_combine(state, built.filter_prepare(y)))

    def run() -> Array:
        state = start
        for y in series:
            state = step(state, y)
        return np.asarray(state.mean)

    run()
    return Timed(run, STEPS)


def _hgf(network: Any) -> Timed:
    """Three observed nodes, each with a Gaussian random walk above it; the noise is that of the process."""
    series = process(SAMPLES)
    for _ in range(3):
        network.add_nodes(kind="continuous-state", precision=100.0, expected_precision=100.0)
    for node in range(3):
        start = {"mean": float(series[0, node]), "precision": 100.0, "tonic_volatility": -9.0}
        network.add_nodes(kind="continuous-state", value_children=node, **start)

    def run() -> Array:
        network.input_data(input_data=series)
        return np.array([network.node_trajectories[3 + node]["mean"][-1] for node in range(3)], dtype=np.float64)

    run()
    return Timed(run, SAMPLES)


def pyhgf_jax() -> Timed:
    """With `input_data`, whose loop jax compiles once."""
    _one_thread()
    from pyhgf.model import Network

    return _hgf(Network())


def pyhgf_rust() -> Timed:
    """The same network in Rust."""
    _one_thread()  # the package imports jax in any case
    from pyhgf.rshgf import Network

    return _hgf(Network())


RIVALS: dict[str, Callable[[], Timed]] = {
    "numpy": numpy_filter,
    "filterpy": filterpy_filter,
    "dynamax": dynamax_filter,
    "cuthbert": cuthbert_filter,
    "cuthbert-steps": cuthbert_steps,
    "pyhgf-jax": pyhgf_jax,
    "pyhgf-rust": pyhgf_rust,
}
"""By name; its first part is the package."""
TITLES = {
    "numpy": "extended Kalman filter, numpy",
    "filterpy": "extended Kalman filter, filterpy",
    "dynamax": "extended Kalman filter, dynamax, jit, whole run",
    "cuthbert": "extended Kalman filter, cuthbert, jit, whole run",
    "cuthbert-steps": "extended Kalman filter, cuthbert, jit, step by step",
    "pyhgf-jax": "3 random walks, pyhgf, jax in single precision, whole run",
    "pyhgf-rust": "3 random walks, pyhgf, Rust, whole run",
}


def start(name: str, python: str | None = None) -> Timed | str:
    """Make a filter ready, here or in another environment.

    Args:
        name: One of `RIVALS`.
        python: The interpreter of an environment that has its package; None for this one.

    Returns:
        The filter, or why it cannot be timed.
    """
    timed = _here(name) if python is None else _elsewhere(name, python)
    return timed if isinstance(timed, str) else _checked(timed)


def _here(name: str) -> Timed | str:
    package = name.partition("-")[0]
    if find_spec(package) is None:
        extra = "arena-hgf" if package == "pyhgf" else "arena"
        return f"not installed: pip install -e '.[{extra}]'"
    try:
        return RIVALS[name]()
    except Exception as error:
        return f"version {version(package)} does not run here: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:100]


def _elsewhere(name: str, python: str) -> Timed | str:
    """A filter in a process of its own, which does a pass for each line that it is sent."""
    try:
        worker = subprocess.Popen(
            [python, __file__, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError as error:
        return f"does not start: {_first_line(error)}"
    assert worker.stdin is not None
    assert worker.stdout is not None
    atexit.register(worker.kill)
    send, receive = worker.stdin, worker.stdout
    head: Any = json.loads(receive.readline() or '"the process ended"')
    if isinstance(head, str):
        return head

    def run() -> Array:
        print(file=send, flush=True)
        return np.array(json.loads(receive.readline()))

    return Timed(run, head)


def serve(name: str) -> None:
    """Do a pass for each line of standard input, and print the last mean."""
    timed = _here(name)
    print(json.dumps(timed if isinstance(timed, str) else timed.samples), flush=True)
    for _ in () if isinstance(timed, str) else sys.stdin:
        print(json.dumps(timed.run().tolist()), flush=True)


def _checked(timed: Timed) -> Timed | str:
    """The filter, if it does the work: its last states are within 0.1, and its parameters within 0.01, of numpy's."""
    found, wanted = timed.run(), kalman(process(timed.samples))
    tolerance = np.array([0.1] * 3 + [0.01] * 3)
    if np.all(np.abs(found - wanted[: len(found)]) < tolerance[: len(found)]):
        return timed
    return f"gives another estimate: {np.round(found, 3).tolist()}"


if __name__ == "__main__":
    serve(sys.argv[1])

"""A linear model, the Kalman filter of it in numpy, and nonlinear functions for Kalman states."""

import math

import numpy as np
import torch
from scipy.linalg import expm

import pcnet as pc
from pcnet.engine.session import Session
from pcnet.functions.closed_form import Linear
from pcnet.model.schedule import LevelNodes, Schedule, act, adaptive_filtering
from pcnet.nodes import KalmanStateNode, PrecisionNode, SensoryNode
from pcnet.numerics.estimators import Newton
from pcnet.numerics.kernels import White

DT, FLOW = 0.1, np.array([[-0.4, 1.0], [-1.2, -0.1]])


GAIN = np.array([[1.0, 0.0], [0.5, -0.3], [0.0, 2.0]])


STATE_VARIANCE, NOISE_VARIANCE, FIRST = 0.7, np.array([0.2, 0.5, 0.1]), np.array([0.3, -0.2])


OBSERVATIONS = np.random.default_rng(7).standard_normal((25, 3))


STILL = adaptive_filtering(levels=(LevelNodes(precisions=(), parameters=()),))
"""States alone: nothing is learned."""


def linear_graph(learn_noise: bool = False, **options) -> pc.Graph:
    x = KalmanStateNode(
        "x", dim=2, flow=Linear(FLOW), initial_mean=FIRST, initial_sd=0.9, learn_noise=learn_noise, **options
    )
    y = SensoryNode("y", dim=3, orders=1, dt=DT)
    graph = pc.Graph()
    graph.predicts(x, y, via=Linear(GAIN))
    level = Newton()
    graph.weighs(
        PrecisionNode(
            "noise_x", mean=-math.log(STATE_VARIANCE), sd=1.0, kernel=White(), channels="shared", estimator=level
        ),
        x,
    )
    graph.weighs(PrecisionNode("noise_y", mean=-np.log(NOISE_VARIANCE), sd=1.0, kernel=White(), estimator=level), y)
    return graph


class Kalman:
    """The textbook's filter of x ← Fx + noise (Q), y = Gx + noise (R), in numpy.

    Mean and covariance are at first those at the time of the first observation.
    """

    def __init__(self, f, q, g, r, mean, covariance) -> None:
        self.f, self.q, self.g, self.r, self.mean, self.covariance = f, q, g, r, mean, covariance
        self.log_evidence, self.steps = 0.0, 0

    def step(self, y: np.ndarray) -> None:
        if self.steps:
            self.predict()
        self.steps += 1
        self.update(y)

    def predict(self) -> None:
        self.mean = self.f @ self.mean
        self.covariance = self.f @ self.covariance @ self.f.T + self.q

    def update(self, y: np.ndarray) -> None:
        seen = np.isfinite(y)
        g, r, y = self.g[seen], self.r[np.ix_(seen, seen)], y[seen]
        if not len(y):
            return
        s, e = g @ self.covariance @ g.T + r, y - g @ self.mean
        gain = self.covariance @ g.T @ np.linalg.inv(s)
        self.log_evidence += -0.5 * (e @ np.linalg.solve(s, e) + np.linalg.slogdet(2 * np.pi * s)[1])
        self.mean = self.mean + gain @ e
        self.covariance = self.covariance - gain @ s @ gain.T


def step_matrices(matrix: np.ndarray, dt: float, integrator: str = "rk4") -> tuple[np.ndarray, np.ndarray]:
    """F of a step of ẋ = Ax, and M of its second half."""
    eye, a = np.eye(len(matrix)), dt * matrix
    if integrator == "local_linearisation":
        return expm(a), expm(a / 2)
    f = eye + a + a @ a / 2 + a @ a @ a / 6 + a @ a @ a @ a / 24
    d = f - eye
    return f, eye + d / 2 - d @ d / 8 + d @ d @ d / 16  # √(I + D) to third order


def transition(
    matrix: np.ndarray, variance, dt: float, integrator: str = "rk4", process_noise: str = "diffusion"
) -> tuple[np.ndarray, np.ndarray]:
    """F and Q of one step of ẋ = Ax + ω.

    A diffusion of density T gathers h/6 (T + 4MTMᵀ + FTFᵀ), and noise that is held BTBᵀ with B = h/6 (I + 4M + F). By
    local linearisation a diffusion is exact; by Euler's method they gather hT and h²T.
    """
    eye, density = np.eye(len(matrix)), np.diag(np.broadcast_to(variance, len(matrix)))
    if integrator == "euler":
        return eye + dt * matrix, density * (dt if process_noise == "diffusion" else dt**2)
    if integrator == "local_linearisation" and process_noise == "diffusion":
        return exact_transition(matrix, variance, dt)
    f, half = step_matrices(matrix, dt, integrator)
    if process_noise == "diffusion":
        return f, dt / 6 * (density + 4 * half @ density @ half.T + f @ density @ f.T)
    gain = dt / 6 * (eye + 4 * half + f)
    return f, gain @ density @ gain.T


def in_steps(matrix: np.ndarray, variance, dt: float, interval: float = DT) -> tuple[np.ndarray, np.ndarray]:
    """F and Q of a diffusion over a time dt, in 1, 2, 4, … steps of a Runge–Kutta method of 1.5 intervals at most."""
    steps = 1
    while dt > 1.5 * steps * interval:
        steps *= 2
    f, q = transition(matrix, variance, dt / steps)
    whole, gathered = np.eye(len(matrix)), np.zeros_like(q)
    for _ in range(steps):
        whole, gathered = f @ whole, f @ gathered @ f.T + q
    return whole, gathered


def exact_transition(matrix: np.ndarray, variance, dt: float) -> tuple[np.ndarray, np.ndarray]:
    """F = exp(AΔ) and Q = ∫exp(As) T exp(Aᵀs) ds of a diffusion, by Van Loan's method."""
    n = len(matrix)
    density = np.diag(np.broadcast_to(variance, n))
    whole = expm(dt * np.block([[-matrix, density], [np.zeros((n, n)), matrix.T]]))
    f = whole[n:, n:].T
    return f, f @ whole[:n, n:]


def kalman(dt: float = DT, **scheme) -> Kalman:
    f, q = transition(FLOW, STATE_VARIANCE, dt, **scheme)
    return Kalman(f, q, GAIN, np.diag(NOISE_VARIANCE), FIRST, 0.81 * np.eye(2))


def bent_flow(x, theta):
    return torch.sin(x.flip(-1) * theta[..., :1]) - theta[..., 1:] * x


def bent_mapping(x, theta):
    return torch.cat([x + 0.2 * x**2, x[..., :1] * x[..., 1:]], -1) * theta


BENT_FLOW, BENT_MAPPING = pc.TracedFunction(bent_flow), pc.TracedFunction(bent_mapping)


GATHER = Schedule(
    on_start=STILL.on_start,
    acts=(*STILL.acts, act("accumulate", "parameter", "precision")),
    on_end=(act("update_covariance", "parameter", "precision"),),
    name="filtering without learning",
)
"""Scores are accumulated, and exact, as for fits to recorded data."""


def one_pass(graph: pc.Graph, observations) -> Session:
    """A pass over recorded data before its last actions, with the scores that it has accumulated."""
    return Session(pc.Model(graph, GATHER), record=()).run(observations)


def central_differences(evidence, point: np.ndarray, step: float) -> np.ndarray:
    sides = [[evidence(point + sign * step * e) for sign in (1, -1)] for e in np.eye(len(point))]
    return np.array([(plus - minus) / (2 * step) for plus, minus in sides])

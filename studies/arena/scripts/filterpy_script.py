"""FitzHugh–Nagumo neuron, potential seen, parameters and noise unknown: filterpy, noise from a grid."""

import sys

import numpy as np
from filterpy.kalman import MerweScaledSigmaPoints, UnscentedKalmanFilter

y = np.load(sys.argv[1])


def neuron(x, p):
    return np.stack([x[0] - x[0] ** 3 / 3 - x[1] + p[0], p[1] * (x[0] + 0.7 - 0.8 * x[1])])


def step(z, dt):
    x, p, h = z[:2], z[2:], dt / 2
    for _ in range(2):
        k1 = neuron(x, p)
        k2 = neuron(x + 0.5 * h * k1, p)
        k3 = neuron(x + 0.5 * h * k2, p)
        k4 = neuron(x + h * k3, p)
        x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return np.concatenate([x, p])


def run(sd_x, sd_y, y):
    points = MerweScaledSigmaPoints(4, alpha=0.1, beta=2.0, kappa=-1.0)
    ukf = UnscentedKalmanFilter(4, 1, 0.2, lambda z: z[:1], step, points)
    ukf.x, ukf.P = np.array([0.0, 0.0, 0.3, 0.12]), np.diag([0.5, 0.5, 0.3, 0.05]) ** 2
    ukf.Q, ukf.R = np.diag([0.2 * sd_x**2, 0.2 * sd_x**2, 0.0, 0.0]), np.array([[sd_y**2]])
    evidence = 0.0
    for now in y:
        ukf.predict()
        ukf.update(now)
        evidence += ukf.log_likelihood
    return evidence, ukf


rough = np.diff(y[:, 0]).std() / np.sqrt(2)
grid = [(0.15 * a, rough * b) for a in np.exp([-2.0, 0.0, 1.5]) for b in np.exp([-2.0, 0.0, 1.5])]
best = max(grid, key=lambda levels: run(*levels, y[: len(y) // 3])[0])
_, ukf = run(*best, y)
print(ukf.x, np.sqrt(np.diag(ukf.P)))

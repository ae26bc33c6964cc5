"""Smoothers in numpy, written independently: brute force, extended and unscented Rauch–Tung–Striebel."""

import numpy as np


def rk4(flow, x, dt, steps=1):
    for _ in range(steps):
        h = dt / steps
        a = flow(x)
        b = flow(x + h / 2 * a)
        c = flow(x + h / 2 * b)
        x = x + h / 6 * (a + 2 * b + 2 * c + flow(x + h * c))
    return x


def sigma_points(m, p):
    """The 2n + 1 points of the unscented transform with κ = 3 − n, and their weights."""
    n = len(m)
    kappa = max(3.0 - n, 0.0)
    root = np.linalg.cholesky((n + kappa) * (p + 1e-12 * np.trace(p) * np.eye(n)))
    points = np.array([m, *(m + root.T), *(m - root.T)])
    weights = np.full(2 * n + 1, 0.5 / (n + kappa))
    weights[0] = kappa / (n + kappa)
    return points, weights


def moments(function, m, p, unscented):
    """Mean and covariance of f(x), and Cov(x, f(x)), for x ~ N(m, p)."""
    if unscented:
        points, weights = sigma_points(m, p)
        values = np.array([function(point) for point in points])
        mean = weights @ values
        away = values - mean
        return mean, (weights[:, None] * away).T @ away, (weights[:, None] * (points - m)).T @ away
    n, step = len(m), 1e-5
    jacobian = np.array([(function(m + step * e) - function(m - step * e)) / (2 * step) for e in np.eye(n)]).T
    return function(m), jacobian @ p @ jacobian.T, p @ jacobian.T


def rts(flow, mapping, y, m, p, q, r, dt, unscented):
    """Filtered and smoothed means (T, n), and smoothed variances.

    Of ẋ = f(x) + noise of density q, y = g(x) + noise of variance r.
    """
    filtered, predicted = [], []
    for k, observed in enumerate(y):
        if k:
            mean, spread, cross = moments(lambda x: rk4(flow, x, dt), m, p, unscented)
            m, p = mean, spread + dt * q
            predicted.append((m, p, cross))
        if np.isfinite(observed).all():
            mean, spread, cross = moments(mapping, m, p, unscented)
            gain = np.linalg.solve(spread + r, cross.T).T
            m, p = m + gain @ (observed - mean), p - gain @ (spread + r) @ gain.T
        filtered.append((m, p))
    means, variances = [m], [np.diag(p)]
    for (m_, p_), (mean, spread, cross) in zip(filtered[-2::-1], predicted[::-1], strict=True):
        gain = np.linalg.solve(spread, cross.T).T
        m, p = m_ + gain @ (m - mean), p_ + gain @ (p - spread) @ gain.T
        means.append(m)
        variances.append(np.diag(p))
    return np.array([each[0] for each in filtered]), np.array(means[::-1]), np.array(variances[::-1])


def simulate(flow, x, samples, dt, q, rng, fine=20):
    """States (T, n) of ẋ = f(x) + noise of density q, by small steps."""
    found, root = [x], np.sqrt(np.diag(q) * dt / fine)
    for _ in range(samples - 1):
        for _ in range(fine):
            x = rk4(flow, x, dt / fine) + root * rng.standard_normal(len(x))
        found.append(x)
    return np.array(found)

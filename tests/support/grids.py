"""Exact filters, smoothers and forecasts of a scalar state that may switch between categories, on a grid."""

import math

import numpy as np


class Grid:
    """Densities p(category, x) on a grid of x.

    Args:
        x: The grid.
        moves: For each category, the density of x after one interval (rows) given that before (columns).
        first: Density of the first x, the same in all categories.
        chain: Probabilities of the next category (columns) given this one (rows).
    """

    def __init__(self, x, moves, first, chain=((1.0,),)):
        self.x, self.chain, self.width = x, np.asarray(chain), x[1] - x[0]
        self.moves = [move / move.sum(0) for move in moves]
        self.start = np.outer(np.full(len(moves), 1 / len(moves)), first / first.sum())

    def moved(self, p):
        return np.stack([move @ each for move, each in zip(self.moves, self.chain.T @ p, strict=True)])

    def run(self, log_likelihoods):
        """Filtered and predicted densities of each observation (T, categories, x), and its log-evidence."""
        filtered, predicted, evidence = [], [], []
        for k, each in enumerate(log_likelihoods):
            p = self.moved(filtered[-1]) if k else self.start
            predicted.append(p)
            top = each.max()
            p = p * np.exp(each - top)
            evidence.append(np.log(p.sum()) + top)
            filtered.append(p / p.sum())
        return np.array(filtered), np.array(predicted), np.array(evidence)

    def smoothed(self, filtered, predicted):
        """Densities given all observations."""
        found = [filtered[-1]]
        for p, after in zip(filtered[-2::-1], predicted[:0:-1], strict=True):
            ratio = np.divide(found[-1], after, out=np.zeros_like(after), where=after > 1e-290)
            back = np.stack([move.T @ each for move, each in zip(self.moves, ratio, strict=True)])
            found.append(p * (self.chain @ back))
        return np.array(found[::-1])

    def moments(self, p):
        """Means and standard deviations of densities (T, categories, x)."""
        whole = p.sum(1)
        mean = whole @ self.x
        return mean, np.sqrt((whole * (self.x - mean[:, None]) ** 2).sum(1))


def well_grid(dt, process=0.6, first=1.0, parts=8):
    """Two wells, ẋ = 2x(1 − x²) with diffusion."""
    x = np.linspace(-3.5, 3.5, 501)
    h = dt / parts
    one = np.exp(-0.5 * ((x[:, None] - x - h * 2 * x * (1 - x**2)) / process) ** 2 / h)
    return Grid(x, [np.linalg.matrix_power(one / one.sum(0), parts)], np.exp(-0.5 * (x / first) ** 2))


def switching_grid(dt, chain, levels, process=0.6, first=1.0):
    """A state that is pulled to one of several levels, ẋ = 4(v − x) with diffusion."""
    x, kept = np.linspace(-4.0, 4.5, 601), math.exp(-4 * dt)
    variance = process**2 * (1 - kept**2) / 8
    moves = [np.exp(-0.5 * (x[:, None] - v - kept * (x - v)) ** 2 / variance) for v in levels]
    return Grid(x, moves, np.exp(-0.5 * (x / first) ** 2), chain)


def path(grid, samples, seed):
    """States, drawn from the grid itself."""
    rng, states = np.random.default_rng(seed), []
    category, place = 0, int(np.searchsorted(grid.start[0].cumsum() / grid.start[0].sum(), rng.random()))
    for k in range(samples):
        if k:
            category = rng.choice(len(grid.chain), p=grid.chain[category])
            place = rng.choice(len(grid.x), p=grid.moves[category][:, place])
        states.append(grid.x[place])
    return np.array(states)

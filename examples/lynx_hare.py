"""A real record: hares and lynxes of the Hudson Bay Company, tracked by a Lotka–Volterra graph and forecast.

Run it:  python examples/lynx_hare.py
The record is that of pelts (in thousands) which the company took in 1900 to 1920. examples/lynx_hare.csv is the table
of P. Howard, "Modeling basics", lecture notes for Math 442, Texas A&M University (2009), number by number as
B. Carpenter uses it in "Predator-prey population dynamics: the Lotka–Volterra model in Stan" (2018). The graph is a
file, examples/lynx_hare.yaml; all that it cannot hold is the flow, which is named here.

Every year is forecast from the years before, and compared with "as last year". This shows how it is done, and is no
test of how well: the rates of the flow are rounded from what others found in all of these years, and precisions and
orders were chosen with the same years in view, so that each forecast owes something to the years that it forecasts.
Only states are inferred, not the law they follow, and the intervals are rather too wide: errors are about 0.7 of what
is stated for them. Then the last year's beliefs are carried ten years on. Writes lynx_hare.png.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import pcnet as pc

HERE = Path(__file__).parent


@pc.register("predator and prey, in logarithms")
@pc.TracedFunction
def flow(x: Tensor, theta: Tensor) -> Tensor:
    """d log hare/dt = a − b lynx, d log lynx/dt = −c + d hare."""
    hare, lynx = x[..., 0].exp(), x[..., 1].exp()
    return torch.stack([theta[..., 0] - theta[..., 1] * lynx, -theta[..., 2] + theta[..., 3] * hare], -1)


def main() -> None:
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--years", type=int, default=10, help="how far to forecast after the last year")
    options = parser.parse_args()
    with (HERE / "lynx_hare.csv").open() as lines:
        table = np.array([[float(cell) for cell in row] for row in list(csv.reader(lines))[1:]])
    years, observed = table[:, 0], np.log(table[:, 1:])

    graph, schedule = pc.load_model(HERE / "lynx_hare.yaml")
    live = graph.start(schedule)
    errors, scores = [], []
    for year, y in zip(years, observed, strict=True):
        if live.tick:
            ahead = live.innovation(y, t=year)["y"]
            errors.append(ahead.error)
            scores.append(ahead.error / ahead.sd)
        live.step(y, t=year)
    error = np.sqrt(np.mean(np.square(errors)))
    persistence = np.sqrt(np.mean(np.square(np.diff(observed, axis=0))))
    covered = np.mean(np.abs(scores) < 1.96)
    print(f"error of a year's forecast, in logarithms: {error:.3f}; as last year: {persistence:.3f}")
    print(f"within the 95 % interval: {covered:.0%} of {np.size(scores)} forecasts")

    later = live.forecast(options.years, 0.1)
    low, high = later.interval("y", 0.8)
    tracked, sd = live.result().mean("x")[:, 0], live.result().sd("x")[:, 0]
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, (name, colour) in enumerate((("hare", "#0072B2"), ("lynx", "#D55E00"))):
        axes.plot(years, table[:, 1 + i], "o", color=colour, markersize=4, label=name)
        axes.plot(years, np.exp(tracked[:, i]), color=colour)
        axes.fill_between(
            years, *np.exp([tracked[:, i] - 2 * sd[:, i], tracked[:, i] + 2 * sd[:, i]]), color=colour, alpha=0.2
        )
        axes.plot(later.times, np.exp(later.mean("y")[:, i]), "--", color=colour)
        axes.fill_between(later.times, np.exp(low[:, i]), np.exp(high[:, i]), color=colour, alpha=0.12)
    axes.set(
        xlabel="year", ylabel="pelts (thousands)", title="Hudson Bay record: tracked, and forecast with 80 % intervals"
    )
    axes.set_ylim(0, 150)
    axes.legend(loc="upper left")
    path = Path("output") / "lynx_hare.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()

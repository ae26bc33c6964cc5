"""A real record: hares and lynxes of the Hudson Bay Company, tracked by a Lotka–Volterra model and forecast.

Run:  python examples/lynx_hare.py
The data are pelts (in thousands) that the company took from 1900 to 1920. examples/lynx_hare.csv is the table of
P. Howard, "Modeling basics", lecture notes for Math 442, Texas A&M University (2009), with the numbers that
B. Carpenter uses in "Predator-prey population dynamics: the Lotka–Volterra model in Stan" (2018). The model is the file
examples/lynx_hare.yaml. Its flow is registered by name in this file.

Each year is forecast from the years before and compared with persistence ("same as last year"). Then the example
forecasts ten years beyond the record and writes output/lynx_hare.png.

This demonstrates usage, not accuracy. The rates of the flow are rounded from published fits to the same years, and
precisions and orders were chosen on them too, so the forecasts are not out of sample. Only states are inferred. The
intervals are too wide: errors are about 0.7 of the stated standard deviations.
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
    parser.add_argument("--years", type=int, default=10, help="length of the forecast after the last year")
    options = parser.parse_args()
    with (HERE / "lynx_hare.csv").open() as lines:
        table = np.array([[float(cell) for cell in row] for row in list(csv.reader(lines))[1:]])
    years, observed = table[:, 0], np.log(table[:, 1:])

    session = pc.Model.load(HERE / "lynx_hare.yaml").start()
    errors, scores = [], []
    for year, y in zip(years, observed, strict=True):
        if session.tick:
            innovation = session.innovation(y, t=year)["y"]
            errors.append(innovation.error)
            scores.append(innovation.error / innovation.sd)
        session.step(y, t=year)
    error = np.sqrt(np.mean(np.square(errors)))
    persistence = np.sqrt(np.mean(np.square(np.diff(observed, axis=0))))
    covered = np.mean(np.abs(scores) < 1.96)
    print(f"RMS error of one-year forecasts of log pelts: {error:.3f}; same as last year: {persistence:.3f}")
    print(f"coverage of the 95 % intervals: {covered:.0%} of {np.size(scores)} forecasts")

    forecast = session.forecast(options.years, 0.1)
    low, high = forecast.interval("y", 0.8)
    result = session.result()
    mean, sd = result.mean("x")[:, 0], result.sd("x")[:, 0]
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, (name, colour) in enumerate((("hare", "#0072B2"), ("lynx", "#D55E00"))):
        axes.plot(years, table[:, 1 + i], "o", color=colour, markersize=4, label=name)
        axes.plot(years, np.exp(mean[:, i]), color=colour)
        axes.fill_between(
            years, *np.exp([mean[:, i] - 2 * sd[:, i], mean[:, i] + 2 * sd[:, i]]), color=colour, alpha=0.2
        )
        axes.plot(forecast.times, np.exp(forecast.mean("y")[:, i]), "--", color=colour)
        axes.fill_between(forecast.times, np.exp(low[:, i]), np.exp(high[:, i]), color=colour, alpha=0.12)
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

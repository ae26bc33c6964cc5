"""A heated house: known inputs, beliefs half an hour later, and a forecast for a planned heating.

Run:  python examples/heating.py
A heater warms the air of a house, the air exchanges heat with the walls, and both lose heat to the outside. The power
of the heater and the temperature outside are known inputs. Only the air is measured, with noise; the temperature of
the walls and the losses are inferred. Each belief is read online, and again six observations later, when it is
smoothed with all that was seen since. In the end the next day is forecast for a planned heating. The example prints
errors and writes output/heating.png.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import pcnet as pc
from pcnet.graphs import adaptive_filter

Array = NDArray[np.float64]
DT, LAG, PER_DAY = 1 / 12, 6, 288  # hours; observations; observations a day
LOSSES = np.array([0.25, 0.05])  # of the air, and of the walls
PROCESS, NOISE = 0.1, 0.4  # °C per √hour, and °C


def house(x: Tensor, u: Tensor, theta: Tensor) -> Tensor:
    """Temperatures of air and walls, with heating power and outside temperature as inputs, and losses θ."""
    air, walls, power, outside = x[..., 0], x[..., 1], u[..., 0], u[..., 1]
    to_walls = 1.2 * (walls - air)
    return torch.stack(
        [to_walls + theta[..., 0] * (outside - air) + power, -0.15 * to_walls + theta[..., 1] * (outside - walls)], -1
    )


model = adaptive_filter(
    house,
    dim=2,
    dt=DT,
    mapping=pc.systems.linear([[1.0, 0.0]]),
    inputs={"heating": 2},
    parameter_mean=[0.4, 0.1],
    parameter_sd=[0.2, 0.05],
    initial_mean=[18.0, 18.0],
    initial_sd=2.0,
)


def inputs(samples: int) -> Array:
    """Heating power in °C per hour, on in the morning and in the evening, and the temperature outside, (time, 2)."""
    hour = DT * np.arange(samples) % 24
    power = 6.0 * (((hour > 5) & (hour < 9)) | ((hour > 16) & (hour < 22)))
    return np.stack([power, 6 - 4 * np.cos(2 * math.pi * (hour - 3) / 24)], 1)


def world(known: Array, seed: int) -> tuple[Array, Array]:
    """True temperatures (time, 2), and those that are observed, (time, 1)."""
    rng = np.random.default_rng(seed)
    x, states = torch.tensor([17.0, 16.0], dtype=torch.float64), []
    theta, fine = torch.tensor(LOSSES), 10
    for u in torch.tensor(known):
        states.append(x.numpy())
        for _ in range(fine):
            x = x + DT / fine * house(x, u, theta) + math.sqrt(DT / fine) * PROCESS * torch.tensor(rng.normal(size=2))
    found = np.array(states)
    return found, found[:, :1] + NOISE * rng.normal(size=(len(known), 1))


def main() -> None:
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--days", type=int, default=3)
    options = parser.parse_args()
    count = options.days * PER_DAY
    known = inputs(count + PER_DAY)
    states, seen = world(known, 0)
    session = model.start(record=("mean", "sd"), smooth=LAG)
    later = np.full((count, 2), np.nan)
    for k in range(count):
        session.step({"y": seen[k], "heating": known[k]})
        if k >= LAG:
            later[k - LAG] = session.smoothed(LAG)["x"].mean
    result = session.result()
    online = result.mean("x")[:, 0]
    ahead = session.forecast(24.0, inputs={"heating": known[count:]})

    settled = slice(count // 2, count - LAG)
    for label, mean in (("online", online), (f"{60 * LAG * DT:.0f} minutes later", later)):
        air, walls = np.sqrt(((mean - states[:count])[settled] ** 2).mean(0))
        print(f"{label}: error of the air {air:.2f} °C, of the walls {walls:.2f} °C")
    air, walls = np.sqrt(((ahead.mean("x") - states[count:]) ** 2).mean(0))
    print(f"forecast of a day: error of the air {air:.2f} °C, of the walls {walls:.2f} °C")
    loss, sd = result.mean("theta")[-1], result.sd("theta")[-1]
    print(f"loss of the air {loss[0]:.2f} ± {sd[0]:.2f} (true: {LOSSES[0]}), of the walls {loss[1]:.3f} ± {sd[1]:.3f}")

    figure = Figure(figsize=(9, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    times = DT * np.arange(len(known)) / 24
    above.plot(times[:count], seen[:count, 0], ".", color="0.75", markersize=2, label="observed")
    mean, spread = ahead.mean("x"), 1.96 * ahead.sd("x")
    for i, (name, colour) in enumerate((("air", "#D55E00"), ("walls", "#0072B2"))):
        above.plot(times, states[:, i], color="black", linewidth=0.8, label="true" if i else None)
        above.plot(times[:count], later[:, i], color=colour, linewidth=1.2, label=name)
        band = mean[:, i] - spread[:, i], mean[:, i] + spread[:, i]
        above.fill_between(times[count:], *band, color=colour, alpha=0.2, linewidth=0)
        above.plot(times[count:], mean[:, i], color=colour, linewidth=1.2, linestyle="--")
    above.axvline(times[count], color="0.5", linewidth=0.8)
    above.set_ylabel("temperature in °C")
    above.legend(frameon=False, fontsize="small", ncols=4, loc="upper left")
    above.margins(y=0.15)
    below.plot(times, known[:, 0], color="black", linewidth=1, label="heating, °C per hour")
    below.plot(times, known[:, 1], color="0.6", linewidth=1, label="outside, °C")
    below.set_xlabel("days")
    below.set_ylim(0, 15)
    below.legend(frameon=False, fontsize="small", ncols=2, loc="upper left")
    path = Path("output") / "heating.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()

"""Track the paper's process with the correct and with a wrong model, and compare them by free action.

Run:  python examples/paper_demo.py      (make paper-demo)
Simulates the generalised Lotka–Volterra (GLV) process of the paper with independent white noise. Tracks it online with
a GLV model and with a Lorenz model, each in the conventions of the paper and of its authors' program. Prints a table
and writes figures. The settings are the paper's, with expected precisions of 500; nothing is tuned to the data.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pcnet import Result
from pcnet.errors import DivergenceError, SettingError
from pcnet.graphs import odem
from pcnet.graphs.odem import MODELS as PRIORS
from pcnet.results.drawing import COLOURS
from pcnet.results.plots import overview
from pcnet.simulate import GLV_PARAMETERS, Simulation, glv_process

MODELS = {"glv": "GLV", "lorenz": "Lorenz"}
CONVENTIONS = {"paper": "paper's conventions", "authors": "authors' conventions"}
LABELS = {"glv": ["a₁₂", "a₁₃", "a₂₃"], "lorenz": ["ρ"]}
TRUTH: dict[str, tuple[float, ...] | None] = {"glv": GLV_PARAMETERS, "lorenz": None}


class Track(NamedTuple):
    """The run of one model, with the mean squared error of its states."""

    model: str
    conventions: str
    result: Result
    error: float
    seconds: float


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    try:
        process = glv_process(options.observations, noise=options.noise, seed=options.seed)
    except SettingError as reason:
        raise SystemExit(f"paper_demo.py: {reason}") from None
    options.output.mkdir(parents=True, exist_ok=True)
    conventions = ["paper", "authors"] if options.conventions == "both" else [options.conventions]
    print(f"GLV process: {options.observations:,} observations, noise {options.noise!r}, seed {options.seed}.")

    tracks = []
    for each in conventions:
        for model in MODELS:
            track = follow(process, model, each)
            if track is not None:
                tracks.append(track)

    report(process, tracks)
    files = [draw(process, track, options.output) for track in tracks]
    if tracks:
        files.append(compare(process, tracks, options.output))
    print("\nFigures:", *(f"  {file}" for file in files), sep="\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--observations", type=int, default=10_000, metavar="N")
    parser.add_argument("--output", type=Path, default=Path("output/paper-demo"), metavar="DIR")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--noise", choices=["white", "smooth", "authors"], default="white")
    parser.add_argument("--conventions", choices=["paper", "authors", "both"], default="both")
    return parser.parse_args()


def follow(process: Simulation, model: Any, conventions: Any) -> Track | None:
    """Run a model over the observations; None if it diverged."""
    print(f"\n{MODELS[model]} model, {CONVENTIONS[conventions]}", flush=True)
    started = time.perf_counter()
    try:
        result = odem(model=model, orders=3, conventions=conventions).run(process.observations)
    except DivergenceError as reason:
        print(f"  diverged: {reason}")
        return None
    error = float(np.mean((result.mean("x")[:, 0] - process.states.numpy()) ** 2))
    return Track(model, conventions, result, error, time.perf_counter() - started)


# --- table -----------------------------------------------------------------------------------------------------------
def report(process: Simulation, tracks: list[Track]) -> None:
    raw = float((process.observations - process.states).square().mean())
    spread = float(process.states.var(0, correction=0).mean())
    head = f"{'model':<8}{'conventions':<13}{'MSE':>10}{'raw MSE':>10}{'free action':>14}{'seconds':>9}   "
    print(f"\n{head}parameters (95 % interval)\n{'-' * (len(head) + 42)}")
    for track in tracks:
        row = f"{MODELS[track.model]:<8}{track.conventions:<13}{track.error:>10.3g}{raw:>10.3g}"
        row += f"{float(track.result.free_action):>14.4g}{track.seconds:>9.1f}   "
        for line in parameters(track):
            print(row + line)
            row = " " * len(row)
    print("\nMSE: mean squared error of the inferred states; raw MSE: that of the observations.")
    for track in tracks:
        print(f"{MODELS[track.model]}, {CONVENTIONS[track.conventions]}: {verdict(track, raw, spread)}")

    for each in dict.fromkeys(track.conventions for track in tracks):
        ranked = sorted(
            (track for track in tracks if track.conventions == each), key=lambda t: float(t.result.free_action)
        )
        if len(ranked) > 1:
            print(f"The free action prefers the {MODELS[ranked[0].model]} model under the {CONVENTIONS[each]}.")


def parameters(track: Track) -> list[str]:
    """One line per parameter: its final interval, and the true value if there is one."""
    band = track.result.interval("theta")
    truth = TRUTH[track.model]
    lines = []
    for i, label in enumerate(LABELS[track.model]):
        mean, half_width = track.result.mean("theta")[-1, i], (band.upper - band.lower)[-1, i] / 2
        known = f"  truth {truth[i]:g}" if truth is not None else "  (no true value in this model)"
        lines.append(f"{label} = {mean:.4g} ± {half_width:.2g}{known}")
    return lines


def verdict(track: Track, raw: float, spread: float) -> str:
    """One sentence on the accuracy of the run."""
    if track.error > spread:
        words = f"lost track: the mean of the states, as a constant, has an MSE of {spread:.3g}."
    elif track.error > raw:
        words = f"{track.error / raw:.0f} times the error of the raw observations."
    else:
        words = f"{track.error / raw:.2f} of the error of the raw observations."
    truth = TRUTH[track.model]
    if truth is None:
        return words
    band, prior = track.result.interval("theta"), np.asarray(PRIORS[track.model].mean)
    known = np.asarray(truth)
    inside = int(((band.lower[-1] <= known) & (known <= band.upper[-1])).sum())
    nearer = int((np.abs(track.result.mean("theta")[-1] - known) < np.abs(prior - known)).sum())
    return (
        f"{words} Parameters: {inside} of {len(known)} intervals contain the truth, "
        f"{nearer} of {len(known)} means are nearer to it than the prior mean."
    )


# --- figures ---------------------------------------------------------------------------------------------------------
def draw(process: Simulation, track: Track, folder: Path) -> Path:
    """Overview of one run."""
    title = (
        f"{MODELS[track.model]} model on the GLV process, {CONVENTIONS[track.conventions]}: "
        f"MSE {track.error:.2g}, free action {float(track.result.free_action):.3g} nats"
    )
    labels = {"theta": LABELS[track.model]}
    figure = overview(track.result, process.states, TRUTH[track.model], title=title, labels=labels)
    return save(figure, folder / f"{track.model}_{track.conventions}.png")


def compare(process: Simulation, tracks: list[Track], folder: Path) -> Path:
    """Inferred and true states, one column per convention."""
    columns = list(dict.fromkeys(track.conventions for track in tracks))
    truth, observed = process.states.numpy(), process.observations.numpy()
    times = process.times.numpy()
    figure = Figure(figsize=(5.5 * len(columns) + 0.5, 7.0), layout="constrained")
    grid = figure.subplots(3, len(columns), sharex=True, sharey="row", squeeze=False)
    for j, convention in enumerate(columns):
        shown = [track for track in tracks if track.conventions == convention]
        for i in range(3):
            ax = grid[i, j]
            ax.plot(times, observed[:, i], ".", markersize=2.0, markeredgewidth=0, color="0.7", label="observations")
            for track, colour in zip(shown, COLOURS, strict=False):
                mean = track.result.mean("x")[:, 0, i]
                ax.plot(times, mean, color=colour, linewidth=1.0, label=f"{MODELS[track.model]} model")
            ax.plot(times, truth[:, i], color="black", linewidth=1.0, linestyle=(0, (4, 2)), label="truth")
            ax.set_ylim(*window(truth[:, i]))
            ax.margins(x=0)
            ax.spines[["top", "right"]].set_visible(False)
            ax.set_ylabel(f"x$_{{{i + 1}}}$")
            ax.label_outer()
            note(ax, shown, i, window(truth[:, i]))
        grid[0, j].set_title(CONVENTIONS[convention], loc="left")
        grid[-1, j].set_xlabel("time")
    handles, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False, markerscale=4)
    return save(figure, folder / "comparison.png")


def window(truth: NDArray[np.float64]) -> tuple[float, float]:
    margin = 0.25 * (truth.max() - truth.min()) or 0.5
    return truth.min() - margin, truth.max() + margin


def note(ax: Any, shown: list[Track], dimension: int, limits: tuple[float, float]) -> None:
    """Note the share of each line that is outside the axis limits."""
    words = []
    for track in shown:
        mean = track.result.mean("x")[:, 0, dimension]
        outside = np.mean((mean < limits[0]) | (mean > limits[1]))
        if outside > 0:
            words.append(f"{MODELS[track.model]}: outside the axis {100 * outside:.2g} % of the time")
    ax.set_title("; ".join(words), loc="right", fontsize="small")


def save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    return path


if __name__ == "__main__":
    main()

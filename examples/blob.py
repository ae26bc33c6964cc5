"""Track a position from images: a blob on a perturbed orbit, in images of 32 × 32 pixels with strong noise.

Run:  python examples/blob.py
The state is a position in the plane with its velocity and acceleration, the mapping is a torch module that renders it,
and the sensory node has 1,024 channels. The model is a circle at constant speed; the true radius and speed vary. The
example prints the error of the tracked position, the errors of two estimators that use one image at a time (centre of
mass and brightest spot), and the learned pixel noise. It writes output/blob.png.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn

import pcnet as pc
from pcnet.numerics.estimators import RobbinsMonro
from pcnet.numerics.integrators import LocalLinearisation

SIDE, DT, NOISE = 32, 0.05, 0.7  # pixels per side, seconds per frame, sd of the pixel noise; the blob has height 1
PIXEL = 2 / (SIDE - 1)  # size of a pixel; the field of view is [−1, 1]²
COLOURS = {"tracked": "#0072B2", "brightest spot": "#E69F00", "centre of mass": "#999999"}


class Renderer(nn.Module):
    """Render a Gaussian blob: position (..., 2) → image, row by row, (..., SIDE²)."""

    def __init__(self, width: float = 0.12) -> None:
        super().__init__()
        self.width = width
        self.grid: Tensor
        self.register_buffer("grid", torch.linspace(-1, 1, SIDE, dtype=torch.float64))

    def forward(self, position: Tensor, parameters: Tensor) -> Tensor:
        offset = self.grid.to(position) - position[..., None]
        profile = torch.exp(-(offset**2) / (2 * self.width**2))
        return (profile[..., 1, :, None] * profile[..., 0, None, :]).flatten(-2)


def orbit(frames: int) -> Tensor:
    """True positions, (frames, 2), with a radius and a speed that vary around those of the model."""
    times = torch.arange(frames, dtype=torch.float64) * DT
    angle, radius = times + 0.6 * torch.sin(0.5 * times), 0.6 + 0.1 * torch.sin(1.3 * times)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1)


def centre_of_mass(images: Tensor, renderer: Renderer) -> Tensor:
    mass, grid = images.clamp_min(0).view(-1, SIDE, SIDE), renderer.grid
    weight = mass.sum((1, 2))
    return torch.stack([mass.sum(1) @ grid / weight, mass.sum(2) @ grid / weight], -1)


def brightest_spot(images: Tensor, renderer: Renderer) -> Tensor:
    """Position of the best match with a template of the blob (matched filter), (frames, 2)."""
    grid = renderer.grid
    template = torch.exp(-((grid[:, None] - grid) ** 2) / (2 * renderer.width**2))
    best = (template @ images.view(-1, SIDE, SIDE) @ template).flatten(1).argmax(1)
    return torch.stack([grid[best % SIDE], grid[best // SIDE]], -1)


def track(images: Tensor, renderer: Renderer, first: Tensor) -> pc.Result:
    """Track the blob from a first guess of its position."""
    rotation = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    x = pc.GeneralisedStateNode(
        "position",
        dim=2,
        orders=3,
        flow=pc.systems.linear(rotation),
        initial_mean=torch.stack([first, rotation @ first, 0 * first]),
        integrator=LocalLinearisation(kappa=0.06, step_size=DT),
    )
    y = pc.SensoryNode("image", dim=SIDE**2, orders=1, dt=DT)
    estimator = RobbinsMonro(rate=1e-3, t0=0.0, gamma=0.0)
    graph = pc.Graph()
    graph.predicts(x, y, via=renderer)
    graph.weighs(pc.PrecisionNode("process_noise", prior_precision=1000.0, sd=0.1, correlation_time=0.3), x)
    noise = pc.PrecisionNode(
        "pixel_noise", prior_precision=2.0, sd=1.0, correlation_time=0.02, channels="shared", estimator=estimator
    )
    graph.weighs(noise, y)
    schedule = pc.Schedule(
        name="states at every frame, precisions at every fifth",
        acts=(
            pc.act("observe", "sensory"),
            pc.act("update", "state"),
            pc.act("accumulate", "pixel_noise"),
            pc.act("update", "pixel_noise", every=5),
            pc.act("update_covariance", "state", "pixel_noise"),
        ),
    )
    return pc.Model(graph, schedule).run(images, record=("mean", "sd", "prediction"))


def distance(estimate: Tensor, truth: Tensor) -> Tensor:
    """Distance in pixels."""
    return (estimate - truth).norm(dim=-1) / PIXEL


def picture(images: Tensor, predicted: Tensor, truth: Tensor, estimates: dict[str, Tensor], path: Path) -> None:
    from matplotlib.figure import Figure

    frames = len(images)
    shown = [int(frames * share) for share in (0.15, 0.4, 0.65, 0.9)]
    figure = Figure(figsize=(12.5, 6.6), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.75, 1])
    pictures, plane = above.subfigures(1, 2, width_ratios=[1.9, 1])
    axes = pictures.subplots(2, len(shown), sharex=True, sharey=True)
    for column, frame in enumerate(shown):
        for row, image in enumerate((images[frame], predicted[frame])):
            ax = axes[row, column]
            ax.imshow(image.view(SIDE, SIDE), origin="lower", extent=(-1, 1, -1, 1), cmap="gray", vmin=-1, vmax=1.6)
            ax.set(xticks=[], yticks=[])
        axes[0, column].set_title(f"{frame * DT:.1f} s")
        axes[1, column].plot(*truth[frame], "+", color="#D55E00", markersize=11, markeredgewidth=1.8)
    axes[0, 0].set_ylabel("observed", fontsize=12)
    axes[1, 0].set_ylabel("predicted\n(+ truth)", fontsize=12)

    ax = plane.subplots()
    spots, tracked = estimates["brightest spot"], estimates["tracked"]
    centres = estimates["centre of mass"]
    ax.plot(*centres.T, ".", color=COLOURS["centre of mass"], markersize=4, label="centre of mass")
    ax.plot(*spots.T, "x", color=COLOURS["brightest spot"], markersize=4, alpha=0.8, label="brightest spot")
    ax.plot(*truth.T, color="black", linewidth=1.2, label="truth")
    ax.plot(*tracked.T, color=COLOURS["tracked"], linewidth=1.8, label="tracked")
    ax.set(xlim=(-1.02, 1.02), ylim=(-1.02, 1.02), aspect="equal", xticks=[], yticks=[], title="position in the plane")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.01), ncols=2, frameon=False)

    ax = below.subplots()
    times = torch.arange(frames) * DT
    for name in ("centre of mass", "brightest spot", "tracked"):
        error = distance(estimates[name], truth)
        size = float(error.square().mean().sqrt())
        style = {"linewidth": 1.8} if name == "tracked" else {"linewidth": 0.9}
        ax.plot(times, error.clamp_min(0.05), color=COLOURS[name], label=f"{name}, rms {size:.2g} pixels", **style)
    ax.set(yscale="log", xlabel="time (s)", ylabel="error (pixels)", xlim=(0, float(times[-1])), ylim=(0.05, 40))
    ax.set_yticks([0.1, 1, 10], ["0.1", "1", "10"])
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("output"))
    options = parser.parse_args()
    renderer, truth = Renderer(), orbit(options.frames)
    generator = torch.Generator().manual_seed(options.seed)
    clean = renderer(truth, truth[:, :0])
    images = clean + NOISE * torch.randn(clean.shape, generator=generator, dtype=torch.float64)
    spots = brightest_spot(images, renderer)
    result = track(images, renderer, spots[0])
    tracked = torch.as_tensor(result.mean("position")[:, 0])
    estimates = {
        "tracked": tracked,
        "brightest spot": spots,
        "centre of mass": centre_of_mass(images, renderer),
    }
    for name, estimate in estimates.items():
        error = distance(estimate, truth)
        size, worst = float(error.square().mean().sqrt()), float(error.max())
        print(f"{name + ':':<15} error {size:5.2f} pixels rms, largest {worst:5.1f}")
    learned = math.exp(-0.5 * float(result.mean("pixel_noise")[-1, 0]))
    print(f"pixel noise: learned sd {learned:.3f}, true {NOISE}")
    path = options.output / "blob.png"
    picture(images, torch.as_tensor(result.prediction("image")[:, 0]), truth, estimates, path)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()

"""The first observations of a session, and first guesses of noise levels from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.engine.inputs import Observation
from pcnet.model.graph import Graph
from pcnet.model.node import BatchSpec
from pcnet.model.protocols import AssumesNoiseLevels, StartsGiven
from pcnet.numerics.kernels import Kernel, White

LENGTH, LONGEST = 16, 4096
"""Number of observations from which first guesses are found; and of those that are kept if most are empty."""
CHECKED = 8  # at every so many observations it is checked whether there are enough
SHARE = 0.1
"""First guess of a noise before anything is known, as a share of the observation, or of the first sd of a state if it
is given; and of the process noise of an interval, as a share of the increments of the states."""
HIDDEN = 0.03
"""Share of the variance of a state after the first observations that is taken for process noise in all of their
intervals: means of states that are not observed hardly move before something is known of them."""
SIZED_AT = (2, 4, 8)  # observations after which it is checked whether they are much larger than before,
GROWN = 10.0  # by this factor: then what came before, such as a first observation near zero, tells nothing of the noise
SMALLEST = 1e-12  # smallest first guess of a variance, relative to the square of the largest observation


class Opening(NamedTuple):
    """The first observations with their times, and beliefs of the states, by node."""

    observations: list[tuple[Observation, float | None]]
    means: dict[str, list[Tensor]]  # after each of the observations, (..., dim)
    sds: dict[str, Tensor]  # after the last of them

    def seen(self, graph: Graph) -> list[int]:
        """Places of the observations in which something was observed."""
        values = [[value for name, value in each.items() if not graph[name].is_input] for each, _ in self.observations]
        return [i for i, each in enumerate(values) if any(bool(torch.isfinite(value).any()) for value in each)]

    def is_complete(self, graph: Graph) -> bool:
        """Whether there are enough observations for first guesses."""
        return len(self.observations) >= LONGEST or len(self.seen(graph)) >= LENGTH

    def grown(self, names: Sequence[str], graph: Graph, shape: torch.Size) -> dict[str, Tensor] | None:
        """Sizes (B, 1) by precision node, if the observations have just become much larger than they were."""
        count = len(self.observations)
        if count not in SIZED_AT:
            return None
        seen = [each for each, _ in self.observations]
        known = sizes_of(seen[:1], names, graph, shape)
        for n in SIZED_AT[: SIZED_AT.index(count) + 1]:
            before, now = known, sizes_of(seen[:n], names, graph, shape)
            known = {name: torch.where(now[name] > GROWN * size, now[name], size) for name, size in before.items()}
        return known if any(not torch.equal(size, before[name]) for name, size in known.items()) else None

    def guesses(self, names: Iterable[str], graph: Graph, shape: torch.Size, interval: Tensor) -> dict[str, Tensor]:
        """Log-variances (B, n) by precision node.

        Those of observations from third differences, in which a smooth signal nearly vanishes, and white noise has 20
        times its variance. Smooth noise nearly vanishes there, too: it has 20 − 30κ(h) + 12κ(2h) − 2κ(3h) times its
        variance, and the guess is bounded by that before anything is known. Those of processes from the increments of
        the states, and from what is not known of them; with smooth noise, whose integral has the same variance in the
        long run.

        Args:
            names: The precision nodes.
            graph: The graph.
            shape: The batch dimensions.
            interval: Sampling interval, (B,).
        """
        found = {}
        for name, size in sizes_of([each for each, _ in self.observations], names, graph, shape).items():
            child, unknown, kernel = graph.below(graph[name])[0].child, (SHARE * size) ** 2, _kernel_of(graph, name)
            smooth = not isinstance(kernel, White)
            if child.observes:
                values = [each[child.name] for each, _ in self.observations if child.name in each]
                variance = (
                    _third_differences(torch.stack([_flat(value, shape) for value in values])) if values else None
                )
                if variance is not None and smooth:
                    apart = _correlations(kernel, shape, interval * self._spacing(child.name))
                    left = (apart @ apart.new_tensor([20.0, -30.0, 12.0, -2.0]))[:, None] / 20
                    variance = torch.minimum(variance / left.clamp_min(SMALLEST), unknown)
            else:
                places = torch.tensor([i for i in self.seen(graph) if i < len(self.means[child.name])])
                means = torch.stack([_flat(self.means[child.name][i], shape) for i in places])
                increments = means.diff(dim=0) ** 2 / places.diff()[:, None, None]
                hidden = HIDDEN * _flat(self.sds[child.name], shape) ** 2 / len(places)
                variance = (SHARE**2 * increments.mean(0) + hidden) / interval[:, None]
                if smooth:
                    variance = variance / kernel.correlation_integral.expand(shape).reshape(-1, 1)
            variance = unknown if variance is None else torch.where(torch.isfinite(variance), variance, unknown)
            found[name] = torch.maximum(variance, SMALLEST * size**2).log()
        return found

    def _spacing(self, name: str) -> float:
        """Mean number of sampling intervals between two observations of a sensor."""
        seen = [i for i, (each, _) in enumerate(self.observations) if bool(torch.isfinite(each[name]).any())]
        return (seen[-1] - seen[0]) / (len(seen) - 1) if len(seen) > 1 else 1.0

    def add_beliefs(self, means: Mapping[str, Tensor], sds: Mapping[str, Tensor]) -> None:
        """Add means and standard deviations (T, ..., dim) of states, after some of the observations."""
        for name, value in means.items():
            self.means.setdefault(name, []).extend(value)
            self.sds[name] = sds[name][-1]

    def series(self) -> tuple[dict[str, Tensor] | None, list[float] | None]:
        """All observations by node, (T, ..., n), and their times; None for observations of different forms."""
        forms = {tuple((name, value.shape) for name, value in each.items()) for each, _ in self.observations}
        times = [t for _, t in self.observations if t is not None]
        if len(forms) != 1 or len(times) not in (0, len(self.observations)):
            return None, None
        names = self.observations[0][0]
        return {name: torch.stack([each[name] for each, _ in self.observations]) for name in names}, times or None

    def tensors(self) -> dict[str, Tensor]:
        """All of it by name, for a checkpoint."""
        times = [math.nan if t is None else t for _, t in self.observations]
        found = {"times": torch.tensor(times, dtype=torch.float64)}
        for i, (observation, _) in enumerate(self.observations):
            found |= {f"observation/{i}/{name}": value for name, value in observation.items()}
        found |= {f"mean/{name}": torch.stack(each) for name, each in self.means.items()}
        return found | {f"sd/{name}": value for name, value in self.sds.items()}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Opening:
        """The opening that `tensors` gave."""
        times = [None if math.isnan(t) else t for t in tensors["times"].tolist()]
        observations: list[dict[str, Tensor]] = [{} for _ in times]
        means: dict[str, list[Tensor]] = {}
        sds: dict[str, Tensor] = {}
        for name, value in tensors.items():
            kind, _, rest = name.partition("/")
            if kind == "mean":
                means[rest] = list(value)
            elif kind == "sd":
                sds[rest] = value
            elif kind == "observation":
                number, _, node = rest.partition("/")
                observations[int(number)][node] = value
        return cls(list(zip(observations, times, strict=True)), means, sds)


def next_check(tick: int) -> int:
    """The number of observations after which first guesses may have to change."""
    return next((each for each in SIZED_AT if each > tick), max(LENGTH, (tick // CHECKED + 1) * CHECKED))


def unknown(sizes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """First guesses (B, 1) of log-variances before anything is known of the noise but the size of observations."""
    return {name: 2 * (SHARE * size).log() for name, size in sizes.items()}


def sizes_of(
    observations: Sequence[Observation], names: Iterable[str], graph: Graph, shape: torch.Size
) -> dict[str, Tensor]:
    """The size of what each precision node weighs, (B, 1) or (B, d).

    The largest observation of its sensor; the sd of the first belief of a state, or if it is not given, the largest
    observation of all.
    """
    seen = [{k: v for k, v in each.items() if not graph[k].is_input} for each in observations]
    found = {}
    for name in names:
        child = graph.below(graph[name])[0].child
        own = [{child.name: each[child.name]} for each in seen if child.name in each]
        size = largest(own if child.observes else seen, shape)
        given = None
        if isinstance(child, StartsGiven):
            given = child.first_sd(BatchSpec(shape.numel(), size.dtype, size.device, shape))
        found[name] = size if given is None else given
    return found


def largest(observations: Iterable[Observation], shape: torch.Size) -> Tensor:
    """The largest size of all observed values of each batch element, (B, 1); 1 where there are none."""
    sizes = [_flat(value, shape).abs().nan_to_num(0.0) for each in observations for value in each.values()]
    size = torch.cat(sizes, -1).amax(-1, keepdim=True) if sizes else torch.zeros(shape.numel(), 1, dtype=torch.float64)
    return torch.where(size > 0, size, 1.0)


def _flat(value: Tensor, shape: torch.Size) -> Tensor:
    """A value (..., n) of the whole batch, (B, n)."""
    return (
        value.expand(*shape, value.shape[-1]).reshape(shape.numel(), -1)
        if value.dim() <= len(shape) + 1
        else value.reshape(shape.numel(), -1)
    )


def _kernel_of(graph: Graph, name: str) -> Kernel:
    node = graph[name]
    assert isinstance(node, AssumesNoiseLevels)
    return node.noise_kernel


def _correlations(kernel: Kernel, shape: torch.Size, interval: Tensor) -> Tensor:
    """κ(0), κ(h), κ(2h) and κ(3h) at intervals h (B,); (B, 4)."""
    apart = [kernel.correlation(k * interval.reshape(shape)).expand(shape).reshape(-1) for k in range(4)]
    return torch.stack(apart, 1)


def _third_differences(values: Tensor) -> Tensor:
    """Variance of white noise in values (T, B, n), (B, n); NaN where too little is observed."""
    if not bool(torch.isnan(values).any()):
        return (values.diff(n=3, dim=0) ** 2).mean(0) / 20
    found = torch.full_like(values[0], math.nan)
    for b, c in torch.cartesian_prod(*(torch.arange(size) for size in values.shape[1:])).tolist():
        seen = values[:, b, c]
        seen = seen[torch.isfinite(seen)]
        if len(seen) > 3:
            found[b, c] = (seen.diff(n=3) ** 2).mean() / 20
    return found

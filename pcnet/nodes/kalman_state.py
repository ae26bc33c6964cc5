"""States that carry their whole belief through time: a Kalman filter in messages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.functions.base import Function
from pcnet.functions.linearisation import Linearisation
from pcnet.model.messages import Error, ParameterTransition, Prediction
from pcnet.model.node import BatchSpec, Energy, ForecastStep, Link, Node, NodeContext, Recordable
from pcnet.nodes.augmented_layout import Layout, Source, each, lay_out
from pcnet.nodes.generalised_state import GeneralisedStateNode
from pcnet.nodes.precision import noise_error
from pcnet.numerics import kalman as carrying
from pcnet.numerics.coloured_noise import Noise, NoiseModel
from pcnet.numerics.kalman import GaussianWithSensitivities, PredictiveDistribution, ScoreAndInformation
from pcnet.numerics.kernels import SquaredExponential
from pcnet.numerics.laplace import standard_deviations
from pcnet.settings import PositiveVector, at_least_1d, number, settings


class KalmanBelief(NamedTuple):
    """What is carried (see `Carried`) of n numbers: the state, and after it those that make up noises.

    Of all nodes below together, of d channels: what was expected before they were heard (see `Expected`), and its
    covariance with what had been expected of them before (B, d, d). What their errors said of the parameters (B, p)
    and of the own noises (B, o), each with its information. By how much they corrected the state, and how hard they
    pulled at it, Σ Cᵀξ (B, dim).
    """

    mean: Tensor
    shares: Tensor
    dmean_dtheta: Tensor
    dmean_dlogvar: Tensor
    expected: Tensor
    expected_covariance: Tensor
    expected_dmean_dlogvar: Tensor
    expected_covariance_by_source: Tensor
    doubt: Tensor
    between: Tensor
    of_parameters: Tensor
    information_of_parameters: Tensor
    of_noise: Tensor
    information_of_noise: Tensor
    correction: Tensor
    pull: Tensor

    @property
    def carried(self) -> GaussianWithSensitivities:
        return GaussianWithSensitivities(*self[: len(GaussianWithSensitivities._fields)])

    def expected_of(self, channels: slice, levels: slice) -> PredictiveDistribution:
        """What was expected of some of the channels, and what it owes to some of the log-variances."""
        return PredictiveDistribution(
            self.expected[:, channels],
            self.expected_covariance[:, channels, channels],
            self.expected_dmean_dlogvar[:, channels, levels],
            self.expected_covariance_by_source[:, levels, channels, channels],
            self.doubt[:, channels, channels] if self.dmean_dtheta.shape[-1] else None,
        )


BEYOND = "its covariance is beyond all numbers; an observation far off may be given as NaN, or let on_divergence='hold'"
HEARD = KalmanBelief._fields[-6:]
"""What is so only of the present observation."""


class KalmanMemory(NamedTuple):
    """At which parameters (B, p), variances (B, all channels) and widths of noises (B, noises) it runs.

    time: until when it was carried, (B,). phase: how far the numbers of each noise are on their way, (B, noises).
    handed: how often the beliefs about the parameters had been handed over by then, (B, p).
    """

    parameters: Tensor
    variance: Tensor
    width: Tensor
    time: Tensor
    phase: Tensor
    handed: Tensor


class KalmanRule:
    """The variance of the first state (B, dim), and, once it was found, where everything is.

    placed: whether belief and memory have found their place there since the node has begun.
    """

    __slots__ = ("first", "layout", "looking", "placed")

    def __init__(self, first: Tensor) -> None:
        self.first = first
        self.layout: Layout | None = None
        self.looking = False
        self.placed = False


@settings
class KalmanStateNode(GeneralisedStateNode):
    """A hidden state (..., dim) that carries mean, covariance and sensitivities from one observation to the next.

    Asked to `carry`, it takes its belief along the flow to the present: x ← x + dt f(x, θ), P ← FPFᵀ + Q. Asked to
    `move`, it takes in the errors of the nodes below, one node after the other. Asked to `settle`, it follows
    parameters and precisions that have changed. For linear flows, mappings and white noise this is the Kalman filter;
    for others the extended one. What parameters and precisions hear of the errors accounts for all that the belief
    owes to them.

    Noise with a kernel `White` is another at each observation and stays until the next. Noise with a
    squared-exponential kernel is a sum of shocks, each of which acts in the form of a bell; noise with a Matérn kernel
    of smoothness 1/2 decays and is fed; both are part of what is believed. Other kernels, and squared exponentials with
    shocks=0, are taken for white noise that is as strong at low frequencies. Several precision nodes may weigh the
    state: its noise is the sum of theirs.

    initial_sd: how uncertain the first state is, one number or (..., dim).
    noise: "learned" lets precision nodes hear of the errors; "given" takes what they say as it is, which costs less.
    shocks: how many of them make up a smooth noise at a time.
    bend: "keep" what a flow that is not linear does to the mean of what is uncertain, ½ tr(∂²f/∂x² P); "drop" it, as
    the extended Kalman filter does.
    substeps: how many Euler steps there are from one observation to the next.
    """

    _: KW_ONLY
    orders: int = Field(default=1, ge=1, le=1)
    initial_sd: PositiveVector = number(1.0)
    learn_noise: bool = True
    second_order: bool = True
    n_pulses: int = Field(default=5, ge=0)
    substeps: int = Field(default=1, ge=1)
    role: ClassVar[str] = "state"
    sure: ClassVar[bool] = True
    required_actions: ClassVar[tuple[str, ...]] = ("predict", "update")
    multiple_noises: ClassVar[bool] = True

    def __post_init__(self) -> None:
        GeneralisedStateNode.__post_init__(self)
        if at_least_1d(self.initial_sd).shape[-1] not in (1, self.dim):
            raise SettingError(
                f"{self.title}: initial_sd must be one number or end in {self.dim} (for a batch of single values add a "
                "dimension: initial_sd[:, None])"
            )
        if 0 < self.n_pulses < 3:
            raise SettingError(f"{self.title}: it takes 3 shocks or more to make a smooth noise; 0 takes it for white")

    # --- composing ---------------------------------------------------------------------------------------------
    def describe(self) -> str:
        return f"dim {self.dim}, flow {self.flow!r}"

    def as_parent(self, link: Link) -> None:
        if link.kind != "predicts":
            Node.as_parent(self, link)
        shape = link.child.error_shape
        assert shape is not None
        if shape.rows != 1:
            raise GraphError(
                f"{self.title} predicts values, not their motion: give {link.child.name!r} one order, orders=1"
            )

    def as_child(self, link: Link) -> None:
        if link.kind in ("predicts", "drives"):
            raise GraphError(
                f"{self.title} carries its own belief and cannot be the one that {link.parent.name!r} {link.kind}; "
                "use a StateNode, or make what drives it part of the state"
            )

    # --- beginning ---------------------------------------------------------------------------------------------
    def begin(self, local: NodeContext, start: BatchSpec) -> None:
        mean = torch.zeros(1, self.dim) if self.initial_mean is None else self.initial_mean
        value, sd = start.fill(mean, 2)[:, 0], at_least_1d(self.initial_sd)
        local.rule = KalmanRule(start.fill(sd.expand(*sd.shape[:-1], self.dim), 1) ** 2)
        local.belief = self._blank(value, local.rule.first, self.dim, 0, 0, 0, 0)
        shapes: tuple[tuple[int, ...], ...] = ((0,), (0,), (0,), (), (0,), (0,))
        memory = KalmanMemory(*(value.new_zeros(start.batch, *shape) for shape in shapes))
        local.memory = memory._replace(time=memory.time.double())

    def _blank(self, value: Tensor, variance: Tensor, n: int, p: int, d: int, s: int, o: int) -> KalmanBelief:
        """A belief in nothing but a value (B, dim), as sure as its variance (B, dim) says.

        Of these sizes (see `Layout`), with o log-variances of its own.
        """
        room = [(1 + s, n, n), (n, p), (n, s), (d,), (d, d), (d, s), (s, d, d), (d, d), (d, d)]
        room += [(p,), (p, p), (o,), (o, o), (self.dim,), (self.dim,)]
        mean = torch.constant_pad_nd(value, (0, n - self.dim))
        belief = KalmanBelief(mean, *(value.new_zeros(len(value), *shape) for shape in room))
        belief.shares[:, 0, : self.dim, : self.dim] = variance.diag_embed()
        return belief

    def initialise(self, local: NodeContext) -> None:
        """Find the first value from the first observation, and be as uncertain of it as `initial_sd` says.

        One that is given is that of the beginning, even if nothing was seen for a while.
        """
        self._make_room(local)
        GeneralisedStateNode.initialise(self, local)

    def _make_room(self, local: NodeContext) -> None:
        """Give belief and memory the size that the neighbours ask for, and let batch elements that begin do so here."""
        if local.rule.placed:
            return
        local.rule.placed = True
        layout, belief, mask = self._layout(local), local.belief, local.mask
        value: Tensor = belief.mean[:, : self.dim]
        if belief.expected.shape[1] == layout.channels:  # some begin anew, or a run goes on
            local.mask = (local.memory.variance == 0).all(1)
        else:
            sizes = (layout.channels, len(layout.of_level), layout.own_levels.stop)
            local.mask, batch = None, len(value)
            local.belief = self._blank(value, local.rule.first, layout.size, layout.width, *sizes)
            local.memory = local.memory._replace(phase=value.new_zeros(batch, len(layout.sources)))
        if local.mask is None or bool(local.mask.any()):
            self._believe(local, value, moving=True)
        local.mask = mask

    def _believe(self, local: NodeContext, value: Tensor, moving: bool) -> None:
        """Believe in this value (B, dim), and expect of the nodes below what follows from it and nothing else."""
        layout, belief = self._layout(local), local.belief
        variances = self._variances(local)
        shares = torch.zeros_like(belief.shares)
        if moving:
            shares[:, 0, : self.dim, : self.dim] = local.rule.first.diag_embed()
        for source in layout.sources:
            variance = layout.by_source(source, variances[:, source.channels]).repeat(1, 1, source.colour.numbers)
            shares[..., source.numbers, source.numbers].diagonal(dim1=-2, dim2=-1).copy_(variance)
        local.memory = KalmanMemory(
            self._all_parameters(local),
            variances,
            self._widths(local, layout),
            local.time - local.elapsed,
            torch.zeros_like(local.memory.phase),
            self._handovers(local, layout).number,
        )
        cleared = {name: torch.zeros_like(getattr(belief, name)) for name in belief._fields[2:]}
        mean = torch.constant_pad_nd(value, (0, layout.size - self.dim))
        local.belief = belief._replace(mean=mean, shares=shares, **cleared)
        for link in local.below:
            self._expect(local, link)

    # --- messages ----------------------------------------------------------------------------------------------
    def prediction(self, local: NodeContext, link: Link) -> Prediction[Tensor]:
        belief = local.belief
        if not belief.expected.shape[1] or local.rule.looking:  # it has not found its bearings yet
            return Prediction(self._linearised(local, link).value)
        layout = self._layout(local)
        here = layout.seen(link)
        expected = belief.expected_of(here, layout.below[link].levels)
        return Prediction(expected.mean[:, None], expected=expected, between=belief.between[:, here, here])

    def error(self, local: NodeContext, link: Link) -> Error[Any]:
        belief = local.belief
        if link.kind == "weighs":
            layout = self._layout(local)
            source = layout.own[link]
            here = source.levels
            said = ScoreAndInformation(belief.of_noise[:, here], belief.information_of_noise[:, here, here])
            return noise_error(said, local.message(link).noise)
        mine = self._layout(local).parameters.get(link, slice(0))
        return Error(belief.of_parameters[:, mine], belief.information_of_parameters[:, mine, mine])

    # --- acting ------------------------------------------------------------------------------------------------
    def predict(self, local: NodeContext) -> None:
        """Take the belief along the flow to the present, and say what is expected of the nodes below."""
        self._make_room(local)
        layout, belief = self._layout(local), local.belief
        carried, p = belief.carried, layout.width
        # with what the belief owes to parameters goes its covariance with what was expected, for those who hand it on
        told = any(not link.child.observes for link in local.below)
        if told:
            towards = torch.bmm(carried.covariance, self._slopes(local).mT)
            carried = carried._replace(dmean_dtheta=torch.cat([carried.dmean_dtheta, towards], -1))
        elapsed = (local.time - local.memory.time).to(belief.mean) / self.substeps
        phase = local.memory.phase
        for _ in range(self.substeps):
            carried, phase = self._advance(local, layout, carried, phase, elapsed)
        local.memory = local.memory._replace(time=local.time, phase=phase)
        new = {name: torch.zeros_like(getattr(belief, name)) for name in HEARD}
        new |= carried._replace(dmean_dtheta=carried.dmean_dtheta[..., :p])._asdict()
        local.belief = belief._replace(**new)
        if told:
            between = torch.bmm(self._slopes(local), carried.dmean_dtheta[..., p:]).mT
            local.belief = local.belief._replace(between=between)
        for link in local.below:
            self._expect(local, link)

    def _advance(
        self, local: NodeContext, layout: Layout, carried: GaussianWithSensitivities, phase: Tensor, elapsed: Tensor
    ) -> tuple[GaussianWithSensitivities, Tensor]:
        """One Euler step, and the shocks that are due in it."""
        d, dt = self.dim, elapsed[:, None, None]
        x, theta = carried.mean[:, None, :d], self._parameters(local, None)
        drift, jacobian = self._drift(carried, theta)
        slope = jacobian.new_zeros(len(elapsed), d, layout.size)
        slope[..., :d] = jacobian
        noise = slope.new_zeros(len(elapsed), 1 + len(layout.of_level), d)
        for source in layout.own.values():
            colour, at = self._colour(local, source), phase[:, source.place]
            slope[..., source.numbers] = each(colour.loads(at), d)
            drift = drift + torch.bmm(slope[..., source.numbers], carried.mean[:, source.numbers, None])[..., 0]
            fresh = (colour.fresh(elapsed) * elapsed**2)[:, None] * local.memory.variance[:, source.channels]
            noise = noise + layout.by_source(source, fresh)
        dmean_dtheta = carried.dmean_dtheta.new_zeros(len(elapsed), d, carried.dmean_dtheta.shape[-1])
        links = local.links_above("parametrises")
        if links:
            dmean_dtheta[..., : theta.shape[-1]] = dt * self.flow.parameter_slope(x, theta, 1)[:, 0]
        carried = carrying.transport(carried, elapsed[:, None] * drift, dt * slope, dmean_dtheta, noise)
        phases = []
        for source in layout.sources:
            variance = layout.by_source(source, local.memory.variance[:, source.channels])
            at = phase[:, source.place]
            carried, at = self._colour(local, source).go_on(carried, source.numbers, variance, at, elapsed)
            phases.append(at)
        return carried, torch.stack(phases, 1)

    def _drift(self, carried: GaussianWithSensitivities, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Where the flow takes what is believed, f(x, θ) + ½ tr(∂²f/∂x² P) (B, dim), and its slope (B, dim, dim)."""
        d = self.dim
        x = carried.mean[:, None, :d]
        if not self.second_order:
            flow = self.flow.linearise(x, theta, 1)
            return flow.value[:, 0], flow.jacobian
        # the change of J along each direction, as if these were orders of motion, is all of the second derivatives
        ways = torch.eye(d).to(x).expand(len(x), d, d)
        flow = self.flow.linearise(torch.cat([x, ways], 1), theta, 1 + d)
        if flow.jacobian_derivative is None:
            return flow.value[:, 0], flow.jacobian
        uncertain = carried.covariance[:, :d, :d]
        return flow.value[:, 0] + 0.5 * (flow.jacobian_derivative * uncertain[:, :, None]).sum((1, 3)), flow.jacobian

    def _expect(self, local: NodeContext, link: Link) -> None:
        """Keep what is expected of a node below, by the belief as it is now."""
        layout, belief = self._layout(local), local.belief
        source = layout.below[link]
        mapping = self._linearised(local, link)
        slope = self._slope(local, layout, link, mapping)
        numbers = belief.mean[:, source.numbers, None]
        mean = mapping.value[:, 0] + torch.bmm(slope[..., source.numbers], numbers)[..., 0]
        found = carrying.expect(belief.carried, mean, slope, self._noise_of(local, layout, source))
        here = layout.seen(link)
        names = ("expected", "expected_dmean_dlogvar", "expected_covariance", "expected_covariance_by_source")
        parts = {name: getattr(belief, name).clone() for name in names}
        parts["expected"][:, here], parts["expected_dmean_dlogvar"][:, here] = found.mean, found.dmean_dlogvar
        parts["expected_covariance"][:, here, here] = found.covariance
        parts["expected_covariance_by_source"][:, :, here, here] = found.covariance_by_source
        if layout.width and len(layout.of_level):
            through = carrying.through(slope, belief.dmean_dtheta, self._direct(local, layout, link))
            parts["doubt"] = belief.doubt.clone()
            parts["doubt"][:, here, here] = through @ self._unsure(local, layout, online=True) @ through.mT
        local.belief = belief._replace(**parts)

    def _colour(self, local: NodeContext, source: Source) -> NoiseModel:
        """How a noise goes on in time, at the width at which this runs."""
        width = local.memory.width[:, source.place]
        return source.colour.with_lengthscale(width) if source.learned_width else source.colour

    def _noise_of(self, local: NodeContext, layout: Layout, source: Source) -> Tensor:
        """The variance of what is another at each observation of a node below, by what it is owed to; (B, 1 + s, d).

        What the numbers of a noise cannot say is owed to nobody: that this handful describes noise not exactly must not
        be taken for less of it.
        """
        colour, variance = self._colour(local, source), local.memory.variance[:, source.channels]
        noise = layout.by_source(source, colour.fresh(local.elapsed)[:, None] * variance)
        noise[:, 0] += colour.rest(local.elapsed)[:, None] * variance
        return noise

    def update(self, local: NodeContext) -> None:
        """Take in the errors of the nodes below, one node after the other."""
        layout = self._layout(local)
        for i, link in enumerate(local.below):
            if i:  # the ones before it have been heard
                self._expect(local, link)
            belief, source = local.belief, layout.below[link]
            error = local.error(link).eliminated
            weighted, precision = error.weighted[:, 0], error.precision.matrix
            mapping = self._linearised(local, link)
            slope, direct = self._slope(local, layout, link, mapping), self._direct(local, layout, link)
            known = error.noise is not None and error.noise.levels
            noise = self._noise_of(local, layout, source) if known else None
            carried, said = belief.carried, dict[str, Tensor]()
            if layout.width:
                of_parameters = carrying.of_parameters(slope, carried.dmean_dtheta, direct, weighted, precision)
                said["of_parameters"] = belief.of_parameters + of_parameters.gradient
                said["information_of_parameters"] = belief.information_of_parameters + of_parameters.information
            if layout.own_levels.stop:
                expected = belief.expected_of(layout.seen(link), layout.own_levels)
                raw = torch.bmm(expected.covariance, weighted[..., None])[..., 0]
                of_noise = carrying.of_noise(expected, raw, precision)
                said["of_noise"] = belief.of_noise + of_noise.gradient
                said["information_of_noise"] = belief.information_of_noise + of_noise.information
            carried = carrying.absorb(carried, slope, direct, weighted, precision, noise)
            said["correction"] = belief.correction + (carried.mean - belief.mean)[:, : self.dim]
            said["pull"] = belief.pull + torch.bmm(weighted[:, None], slope[..., : self.dim])[:, 0]
            local.belief = belief._replace(**carried._asdict(), **said)
        self._watch(local)

    def _watch(self, local: NodeContext) -> None:
        """Say so where the uncertainty of the state is beyond all numbers, though all that it is made of is finite."""
        _, shares, dmean_dtheta, dmean_dlogvar = local.belief.carried
        size = shares.abs().sum() + dmean_dtheta.square().sum() + dmean_dlogvar.square().sum()
        if not math.isfinite(size.item()):
            local.fail(~torch.isfinite(self.covariance(local)).flatten(1).all(1), BEYOND)

    def retune(self, local: NodeContext) -> None:
        """Follow parameters and precisions that have changed: the belief becomes what it would have been with them."""
        self._make_room(local)
        layout, belief, memory = self._layout(local), local.belief, local.memory
        mean, shares, dmean_dtheta, dmean_dlogvar = belief.carried
        theta, variance, width = self._all_parameters(local), self._variances(local), self._widths(local, layout)
        handed = memory.handed
        if layout.width:
            number, reached, kept, lost = self._handovers(local, layout)
            # what was handed over since then goes by where it had got to before, the rest by where it is now
            target = torch.where(number != handed, reached, theta)
            mean = mean + torch.bmm(dmean_dtheta, (target - memory.parameters)[..., None])[..., 0]
            new = (number != handed)[:, None]
            lost = torch.where(new & new.mT, lost, 0.0)
            shares = torch.cat([shares[:, :1] + (dmean_dtheta @ lost @ dmean_dtheta.mT)[:, None], shares[:, 1:]], 1)
            dmean_dtheta = torch.where(new, dmean_dtheta @ kept, dmean_dtheta)
            handed = number
        if len(layout.of_level):
            ratio = (variance / memory.variance).log()  # the same for all channels of a level
            change = ratio @ layout.of_level.mT / layout.of_level.sum(1)
            mean = mean + torch.bmm(dmean_dlogvar, change[..., None])[..., 0]
            shares = torch.cat([shares[:, :1], shares[:, 1:] * change.exp()[..., None, None]], 1)
        local.memory = memory._replace(parameters=theta, variance=variance, width=width, handed=handed)
        local.belief = belief._replace(mean=mean, shares=shares, dmean_dtheta=dmean_dtheta)

    # --- what is to come ---------------------------------------------------------------------------------------------
    def forecast(
        self, local: NodeContext, step: Tensor, every: int, count: int, parameters: bool
    ) -> list[ForecastStep]:
        """What is to come if nothing is seen: after each `every` steps (B,) in time, `count` times.

        The belief is carried on and then put back. parameters: whether what is not known of them counts.
        """
        before, clock = (local.belief, local.memory), local.clock.mark()
        found = []
        try:
            local.clock.wait(step)
            for i in range(count * every):
                local.memory = local.memory._replace(time=local.time - step)
                self.predict(local)
                if (i + 1) % every == 0:
                    found.append(self._coming(local, parameters))
        finally:
            local.clock.go_back(clock)
            local.belief, local.memory = before
        return found

    def _coming(self, local: NodeContext, parameters: bool) -> ForecastStep:
        layout, belief = self._layout(local), local.belief
        state = self.covariance(local) if parameters else belief.carried.covariance[:, : self.dim, : self.dim]
        unsure = self._unsure(local, layout) * parameters
        below = {}
        for link in local.below:
            slope = self._slope(local, layout, link, self._linearised(local, link))
            through = carrying.through(slope, belief.dmean_dtheta, self._direct(local, layout, link))
            expected = belief.expected_of(layout.seen(link), slice(0))
            below[link.child.name] = expected.mean, expected.covariance + through @ unsure @ through.mT
        return ForecastStep(belief.mean[:, : self.dim], state, below)

    def energy(self, local: NodeContext) -> Energy:
        """None of its own: the nodes below say how likely they were, with all that was uncertain."""
        return Energy()

    # --- what can be recorded ----------------------------------------------------------------------------------------
    @property
    def quantities(self) -> Mapping[str, Recordable]:
        return {
            "mean": Recordable(("order", "dimension"), lambda local: local.belief.mean[:, None, : self.dim]),
            "sd": Recordable(
                ("order", "dimension"), self.covariance, lambda found: standard_deviations(found)[..., None, :]
            ),
            "covariance": Recordable(("element", "element_"), self.covariance),
            "error": Recordable(("error_order", "dimension"), lambda local: local.belief.correction[:, None]),
            "weighted_error": Recordable(("error_order", "dimension"), lambda local: local.belief.pull[:, None]),
        }

    def fallbacks(self, local: NodeContext) -> None:  # type: ignore[override]
        """None: where a covariance is lost, the run is told so."""
        return

    def gradient(self, local: NodeContext) -> None:  # type: ignore[override]
        """None: it does not go downhill, it goes to where the gradient is zero."""
        return

    def hessian(self, local: NodeContext) -> None:  # type: ignore[override]
        return None

    def covariance(self, local: NodeContext) -> Tensor:
        """P of the state, with what parameters and precisions that are not known for sure add to it; (B, dim, dim)."""
        layout, belief = self._layout(local), local.belief
        here = slice(self.dim)
        total: Tensor = belief.carried.covariance[:, here, here]
        if belief.expected.shape[1] != layout.channels:  # it has not found its bearings yet
            return total
        for link, part in layout.parameters.items():
            uncertain = local.message(link).covariance
            if uncertain is not None:
                slope = belief.dmean_dtheta[:, here, part]
                total = total + slope @ uncertain @ slope.mT
        for link, source in layout.own.items():
            uncertain = local.message(link).covariance
            if source.levels.stop > source.levels.start and uncertain is not None:
                slope = belief.dmean_dlogvar[:, here, source.levels]
                total = total + slope @ uncertain @ slope.mT
        return total

    # --- what the rules share ----------------------------------------------------------------------------------------
    def _layout(self, local: NodeContext) -> Layout:
        rule: KalmanRule = local.rule
        if rule.layout is None:
            rule.looking = True  # what the neighbours say of their noises does not depend on what they hear meanwhile
            rule.layout = self._lay_out(local)
            rule.looking = False
            local.belief = local.belief  # let them forget what that was
        return rule.layout

    def _lay_out(self, local: NodeContext) -> Layout:
        """Found from the links and the noises of the neighbours, which do not change in a run."""
        own = {link: local.message(link).noise for link in local.links_above("weighs")}
        below = {link: local.error(link).noise for link in local.below}
        for link, found in {**own, **below}.items():
            if found is None:
                what = self.title if link in own else repr(link.child.name)
                raise GraphError(f"the precision of {what} couples channels, which {self.title} cannot carry")
        noises = _sure({**own, **below})
        parameters: dict[Link, int] = {}
        for of in (None, *(link.child for link in local.below)):
            parameters |= {link: link.parent.width for link in local.links_above("parametrises", of)}
        learned = self.learn_noise
        interval = local.elapsed if local.pace is None else local.elapsed / local.pace
        layout = lay_out(
            self.dim, _sure(own), _sure(below), parameters, interval, n_pulses=self.n_pulses, learned=learned
        )
        for link, source in {**layout.own, **layout.below}.items():
            if source.learned_width and link in layout.own:
                raise GraphError(
                    f"the width of {link.parent.name!r} cannot be learned, since the noise of {self.title} is never "
                    "seen by itself; leave out smoothness_sd"
                )
            if source.learned_width and not isinstance(noises[link].kernel, SquaredExponential):
                raise GraphError(
                    f"the width of the noise of {link.child.name!r} is learned only of a squared-exponential kernel, "
                    f"seen as it is by {self.title}; leave out smoothness_sd"
                )
        return layout

    def _noises(self, local: NodeContext) -> list[Noise]:
        """The own ones and those of the nodes below."""
        own = [local.message(link).noise for link in local.links_above("weighs")]
        return [noise for noise in (*own, *(local.error(link).noise for link in local.below)) if noise is not None]

    def _variances(self, local: NodeContext) -> Tensor:
        """Of all noises, (B, all channels)."""
        return torch.cat([noise.variance for noise in self._noises(local)], 1)

    def _widths(self, local: NodeContext, layout: Layout) -> Tensor:
        """The time scales of all noises as they are now, (B, noises)."""
        pairs = zip(layout.sources, self._noises(local), strict=True)
        found = [source.colour.lengthscale_of(noise.kernel) for source, noise in pairs]
        return torch.stack([width.expand(len(local.belief.mean)) for width in found], 1)

    def _all_parameters(self, local: NodeContext) -> Tensor:
        """θ of the flow and of all mappings, (B, p)."""
        links = self._layout(local).parameters
        mean: Tensor = local.belief.mean
        return torch.cat([local.prediction(link) for link in links], -1) if links else mean.new_zeros(len(mean), 0)

    def _handovers(self, local: NodeContext, layout: Layout) -> ParameterTransition:
        """How beliefs about the parameters passed into the present ones, those of all nodes together."""
        reached = self._all_parameters(local).clone()
        number, kept = torch.zeros_like(reached), torch.eye(layout.width).to(reached).repeat(len(reached), 1, 1)
        lost = torch.zeros_like(kept)
        for link, part in layout.parameters.items():
            handover = local.message(link).handover
            if handover is not None:
                number[:, part], reached[:, part] = handover.number[:, None], handover.mean
                kept[:, part, part], lost[:, part, part] = handover.kept, handover.lost
        return ParameterTransition(number, reached, kept, lost)

    def _unsure(self, local: NodeContext, layout: Layout, online: bool = False) -> Tensor:
        """The covariance of the parameters, those of all nodes together; (B, p, p).

        online: of those alone that go on learning; passes over recorded data look for the maximum of all at once.
        """
        unsure = torch.zeros_like(local.belief.information_of_parameters)
        for link, part in layout.parameters.items():
            message = local.message(link)
            known = None if online and message.handover is None else message.covariance
            if known is not None:
                unsure[:, part, part] = known
        return unsure

    def _argument(self, local: NodeContext, function: Function) -> Tensor:
        value: Tensor = local.belief.mean
        return value[:, None, : self.dim]

    def _linearised(self, local: NodeContext, link: Link) -> Linearisation:
        assert link.function is not None
        function, mean, theta = link.function, local.belief.mean, self._parameters(local, link.child)

        def compute() -> Linearisation:
            return function.linearise(self._argument(local, function), theta, 1)

        return local.once(f"mapping to {link.child.name}", compute, mean, theta)

    def _mappings(self, local: NodeContext) -> Mapping[Link, Linearisation]:
        return {link: self._linearised(local, link) for link in local.below}

    def _slope(self, local: NodeContext, layout: Layout, link: Link, mapping: Linearisation) -> Tensor:
        """∂g/∂s of a node below with the shocks of its noise, (B, d, n)."""
        jacobian, source = mapping.jacobian, layout.below[link]
        d = jacobian.shape[1]
        slope = jacobian.new_zeros(len(local.belief.mean), d, layout.size)
        slope[..., : self.dim] = jacobian
        colour = self._colour(local, source)
        said = (1 - colour.rest(local.elapsed)).sqrt()[:, None]
        slope[..., source.numbers] = each(said * colour.loads(local.memory.phase[:, source.place]), d)
        return slope

    def _slopes(self, local: NodeContext) -> Tensor:
        """∂g/∂s of all nodes below, without the noise of observing them; (B, d, n)."""
        layout = self._layout(local)
        parts = []
        for mapping in self._mappings(local).values():
            parts.append(torch.constant_pad_nd(mapping.jacobian, (0, layout.size - self.dim)))
        return torch.cat([part.expand(len(local.belief.mean), -1, -1) for part in parts], 1)

    def _direct(self, local: NodeContext, layout: Layout, link: Link) -> Tensor | None:
        """∂g/∂θ of a mapping at a state that stays, (B, d, p), if it has parameters."""
        links = local.links_above("parametrises", link.child)
        if not links:
            return None
        assert link.function is not None
        x, theta = self._argument(local, link.function), self._parameters(local, link.child)
        found = link.function.parameter_slope(x, theta, 1)[:, 0]
        first = layout.parameters[links[0]].start
        return torch.constant_pad_nd(found, (first, layout.width - first - found.shape[-1]))


def _sure(noises: Mapping[Link, Noise | None]) -> dict[Link, Noise]:
    return {link: noise for link, noise in noises.items() if noise is not None}

"""Kalman states: hidden states whose belief is carried from one observation to the next."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, SkipValidation
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.functions.linearisation import Linearisation as Linearised
from pcnet.model.context import Neighbours
from pcnet.model.links import AnyLink, Drives, Parametrises, Predicts, Weighs
from pcnet.model.messages import BlockPosterior, ClusterPosterior, GaussianPrediction, PredictionError, ScoreError
from pcnet.model.node import BatchSpec, Energy, ErrorShape, Node, Recordable
from pcnet.model.protocols import (
    DividesBelief,
    KeepsNoiseScales,
    SmoothingLayout,
    SmoothsBySteps,
    StartsAtPeaks,
    StartsGiven,
    WarnsAfterRun,
)
from pcnet.nodes.augmented_layout import Noises, make_layout
from pcnet.nodes.flow import check_state, checked_flow, searched_value
from pcnet.nodes.input import InputNode
from pcnet.nodes.kalman_belief import Context, Evidence, KalmanBound, KalmanState, Linearisation, Motion, Reference
from pcnet.nodes.kalman_bending import all_bends, can_bend, part_of
from pcnet.nodes.kalman_cluster import first_values, make_cluster
from pcnet.nodes.kalman_derivatives import derivatives
from pcnet.nodes.kalman_forecast import KalmanForecasts
from pcnet.nodes.kalman_functions import (
    all_jacobians,
    arguments,
    inputs_now,
    known_arguments,
    parameters_of,
)
from pcnet.nodes.kalman_inputs import InputSpec, no_error, with_new_deviations
from pcnet.nodes.kalman_measurement import take_in
from pcnet.nodes.kalman_motion import MAX_FINER, move_by_need, stability
from pcnet.nodes.kalman_noises import lengthscales, variances
from pcnet.nodes.kalman_parameters import (
    follow_joint,
    follow_scored,
    scored_covariance,
    scored_parameters,
    state_covariance,
    transition_numbers,
)
from pcnet.nodes.kalman_predictions import predict_child, predict_children
from pcnet.nodes.kalman_smoothing import (
    TimeUpdate,
    belief_of,
    no_time_update,
    pack,
    unpack,
)
from pcnet.nodes.kalman_start import first_belief, peaks_of_start, start, started, started_at
from pcnet.nodes.precision import PrecisionNode, noise_score_error
from pcnet.numerics.branching import holds
from pcnet.numerics.coloured_noise import NoiseSpec
from pcnet.numerics.estimators import Newton, NoiseScoring, ParameterEstimator
from pcnet.numerics.gaussian_sums import Bends
from pcnet.numerics.kalman import GaussianWithSensitivities, PredictiveDistribution, ScoreAndInformation
from pcnet.numerics.kernels import SquaredExponential
from pcnet.numerics.laplace import standard_deviations
from pcnet.numerics.low_rank import LowRankDistribution, is_wide
from pcnet.numerics.mixtures import Peaks
from pcnet.numerics.smoothing import SmoothedRows, Steps, backward_steps, smooth, smooth_first
from pcnet.numerics.symmetric import known_symmetric
from pcnet.numerics.transitions import IntegratorName
from pcnet.numerics.trees import select, spans, tree_map
from pcnet.settings import PositiveVector, Vector, at_least_1d, check_size, number, settings

STABLE = {"rk4": 2.7 * MAX_FINER, "euler": 2.0}
"""Largest |hλ| of stable steps, which "rk4" divides."""
FAR = 20.0
"""Size of a state that is not observed beyond which a first belief of 0 ± 1 is worth a warning."""
OVERFLOW = (
    "covariance overflowed, because of an outlier or a long gap; pass NaN for outliers, begin anew with model.start() "
    "after the gap, or use on_divergence='hold'"
)


@settings
class KalmanStateNode(
    Node[KalmanState, KalmanBound],
    KalmanForecasts,
    WarnsAfterRun,
    KeepsNoiseScales,
    StartsGiven,
    StartsAtPeaks,
    DividesBelief,
    SmoothsBySteps,
):
    """A hidden state (..., dim) that carries mean and covariance from one observation to the next.

    `predict` is the time update along the flow ẋ = f(x, u, θ, t) + ω, `update` the measurement update with the errors
    of the nodes below, one node after the other; `retune` rescales the covariance to noise levels that have changed.
    Parameters without an estimator of their own are part of the belief, and are learned at every observation. For
    linear flows and mappings this is the Kalman filter, otherwise an extended or unscented one.

    White process noise is a diffusion: its standard deviation is in units of the state per √time, so that the belief
    does not depend on the number of steps. Smooth noise is carried in generalised coordinates, a noise and its motion.
    "velocity" and "acceleration" can be recorded and read, with "velocity_sd" and "acceleration_sd".
    Several precision nodes may weigh the state: its noise is the sum of theirs. Inputs u are those of `InputNode`s that
    drive the state.

    Args:
        dim: Dimension.
        flow: Function of (state, parameters), (state, inputs, parameters) or (state, inputs, parameters, time), or a
            `Function` with its own derivatives. So are mappings.
        initial_mean: State at the first observation, (..., dim); found from that observation unless given.
        initial_sd: Its standard deviation, one number or (..., dim). The default suits states of a size of about 1.
        integrator: "rk4"; "local_linearisation" for stiff flows; or "euler", to match a process simulated that way.
        substeps: Integration steps between two observations; a gap takes more of them, in proportion, and so does
            "rk4" where the flow changes fast, up to 8 times as many.
        linearisation: How means and covariances pass through flow and mappings: "unscented", by regression on points
            that represent the belief; "cubature", on other points; "second_order", by central differences of second
            order; or "taylor", by derivatives at its mean. A step of the flow whose terms of second order exceed those
            of first order is linearised by "taylor" in any case.
        process_noise: White noise as "diffusion", or "held" constant between two observations, as a part of ẋ.
        orders: Orders of motion of smooth noise: a squared-exponential one is carried by orders − 1 coordinates. With
            three and with seven learned levels are right within some per cent, with five they are 10 % too large. A
            Matérn noise of smoothness n − 1/2 has n coordinates in any case.
        learn_noise: Whether precision nodes receive scores; False costs less.
    """

    _: KW_ONLY
    dim: int = Field(ge=1)
    flow: SkipValidation[Any]
    initial_mean: Vector | None = None
    initial_sd: PositiveVector = number(1.0)
    integrator: IntegratorName = "rk4"
    substeps: int = Field(default=1, ge=1)
    linearisation: Linearisation = "unscented"
    process_noise: Literal["diffusion", "held"] = "diffusion"
    orders: int = Field(default=4, ge=2)
    learn_noise: bool = True
    role: ClassVar[str] = "state"
    kind: ClassVar[str] = "state"
    parent_of: ClassVar[tuple[type[AnyLink], ...]] = (Predicts,)
    child_of: ClassVar[tuple[type[AnyLink], ...]] = (Drives, Parametrises, Weighs)
    sends_covariance: ClassVar[bool] = True
    joins_parameters: ClassVar[bool] = True
    joins_causes: ClassVar[bool] = True
    multiple_noises: ClassVar[bool] = True
    keeps_low_rank: ClassVar[bool] = True  # whether it uses the low-rank form of many channels
    required_actions: ClassVar[tuple[str, ...]] = ("predict", "update")

    def __post_init__(self) -> None:
        Node.__post_init__(self)
        object.__setattr__(self, "flow", checked_flow(self, self.flow, self.dim))
        if self.initial_mean is not None and at_least_1d(self.initial_mean).shape[-1] != self.dim:
            given = tuple(self.initial_mean.shape)
            raise SettingError(f"{self.title}: initial_mean has shape {given}; it must end in {self.dim}")
        check_size(self.title, "initial_sd", self.initial_sd, self.dim)

    @property
    def error_shape(self) -> ErrorShape:
        return ErrorShape(1, self.dim)

    def describe(self) -> str:
        return f"dim {self.dim}, flow {self.flow!r}"

    def check_as_parent(self, link: AnyLink) -> None:
        if isinstance(link, Drives):
            raise GraphError(
                f"{self.title} drives nothing: to let it drive {link.child.name!r}, make it a KalmanCauseNode"
            )
        super().check_as_parent(link)
        shape = link.child.error_shape
        if link.child.role == "state" and isinstance(link, Predicts) and not link.child.sends_covariance:
            raise GraphError(
                f"{self.title} cannot predict {link.child.title}: levels of Kalman states are linked by a "
                "KalmanCauseNode that drives the state below, or by the parameters of that state"
            )
        if shape is not None and shape.rows != 1:
            raise GraphError(f"{self.title} predicts values only: give {link.child.name!r} one order, orders=1")

    def check_as_child(self, link: AnyLink) -> None:
        if isinstance(link, Predicts) or (
            isinstance(link, Drives) and not (isinstance(link.parent, InputNode) or link.parent.joins_child)
        ):
            raise GraphError(
                f"{self.title} cannot be the child in {link.parent.name!r} {link.key} {self.name!r}; use a "
                "GeneralisedStateNode, or drive it by an InputNode or a KalmanCauseNode; categories drive a "
                "SwitchingStateNode"
            )
        super().check_as_child(link)

    def depends_on_time(self, links: Neighbours) -> bool:
        return any(each.takes_time for each in (self.flow, *(link.function for link in links.below_of(Predicts))))

    def check(self, links: Neighbours, like: Tensor) -> None:
        check_state(self, self.dim, self.flow, links, like, knows_time=True)

    def default_estimator(self, link: AnyLink, above: tuple[AnyLink, ...]) -> ParameterEstimator | None:
        if isinstance(link, Parametrises):
            return Newton()
        if not self.learn_noise:
            return None
        child = link.child
        wide = (
            isinstance(link, Predicts)
            and self.keeps_low_rank
            and child.takes_low_rank
            and is_wide(child.shape.dim, self.dim)
        )
        return NoiseScoring(independent=wide)

    def bind(self, links: Neighbours, spec: BatchSpec) -> KalmanBound:
        own: dict[Weighs, NoiseSpec] = {}
        below: dict[Predicts, NoiseSpec] = {}
        for weighs in links.above_of(Weighs):
            assert isinstance(weighs.parent, PrecisionNode)
            own[weighs] = self._checked(weighs.parent.spec_of(weighs, spec), self.title)
            if own[weighs].learned_lengthscale:
                raise GraphError(
                    f"the correlation time of {weighs.parent.name!r} cannot be learned, since the noise of "
                    f"{self.title} is never observed by itself; leave out correlation_time_sd"
                )
        for predicts in links.below_of(Predicts):
            noise = below[predicts] = self._checked(links.noise.get(predicts), repr(predicts.child.name))
            if noise.learned_lengthscale and not isinstance(noise.kernel, SquaredExponential):
                raise GraphError(
                    f"the correlation time of the noise of {predicts.child.name!r} can be learned only for a "
                    "squared-exponential kernel; leave out correlation_time_sd"
                )
        cluster = make_cluster(self, self.flow, links)
        dim = max(block.stop for block in cluster.blocks.values())
        of = (None, *(link.child for link in links.below))
        parameters = {each: links.above_of(Parametrises, each) for each in of}
        try:
            places = {link: cluster.blocks[link.child] for link in own}
            noises = Noises(own, places, below, self.orders, self.learn_noise, self.keeps_low_rank)
            given = [link for link in links.above_of(Drives) if link not in cluster.links]
            inputs = {link: self._input_spec(link, spec) for link in given}
            layout = make_layout(dim, noises, parameters, inputs, links.joint, spec.zeros())
        except SettingError as error:
            raise GraphError(f"{self.title}: {error}") from None
        motion = Motion(dim, cluster.flow, self.integrator, self.substeps, self.linearisation, self.process_noise)
        return KalmanBound(motion, cluster, layout, *first_values(cluster, spec), links.smooth)

    def _input_spec(self, link: Drives, spec: BatchSpec) -> InputSpec:
        assert isinstance(link.parent, InputNode)
        return link.parent.input_spec(spec)

    def _checked(self, noise: NoiseSpec | None, what: str) -> NoiseSpec:
        if noise is None:
            raise GraphError(f"the precision of {what} couples channels; use channels='each' or 'shared'")
        return noise

    def init(self, bound: KalmanBound, spec: BatchSpec) -> KalmanState:
        """A state of the right shapes that is not started: its reference variance is 0."""
        layout, zeros = bound.layout, spec.zeros
        n, p, s, o = layout.size, layout.n_scored, layout.n_levels, layout.own_levels.stop
        d = bound.motion.dim
        mean = torch.constant_pad_nd(bound.initial_mean, (0, n - d))
        parts = zeros(1 + s, n, n)
        parts[:, 0, :d, :d] = bound.initial_variance.diag_embed()
        belief = GaussianWithSensitivities(mean, parts, zeros(n, p), zeros(n, s))
        sent = []
        for link, block in layout.below.items():
            d = block.channels.stop - block.channels.start
            distribution: PredictiveDistribution | LowRankDistribution
            if block.is_wide:
                by_source = zeros(1 + s, n, n)
                distribution = LowRankDistribution(zeros(d), zeros(d, n), by_source, zeros(d), zeros(s), zeros(n, s))
            else:
                distribution = PredictiveDistribution(zeros(d), zeros(d, d), zeros(d, s), zeros(s, d, d), zeros(d))
            lagged = 0 if link.child.observes else d
            sent.append(GaussianPrediction(distribution, zeros(lagged, lagged)))
        channels, numbers = zeros(layout.level_channels.shape[1]), zeros(len(layout.all_parameters))
        reference = Reference(zeros(p), channels, channels, zeros(len(layout.noises)), numbers)
        of_parameters, of_noise = (ScoreAndInformation(zeros(n), zeros(n, n)) for n in (p, o))
        evidence = Evidence(of_parameters, of_noise, zeros(layout.joint.stop), zeros(bound.motion.dim))
        inputs = zeros(sum(block.spec.dim for block in layout.inputs))
        update = no_time_update(spec, n if bound.smooth else 0, p)
        return KalmanState(belief, reference, tuple(sent), evidence, zeros().double(), inputs, update)

    def initialise(self, ctx: Context) -> KalmanState:
        """Find the first value from the first observation, unless it is given; its uncertainty is `initial_sd`."""
        ctx.propose(self._started(ctx))
        if self.initial_mean is not None:
            return ctx.state

        def errors(value: Tensor) -> dict[Predicts, PredictionError]:
            ctx.propose(self._start_with(ctx, value, None))
            return {link: ctx.error(link) for link in ctx.below_of(Predicts)}

        def linearise(value: Tensor) -> dict[Predicts, Linearised]:
            ctx.propose(self._start_with(ctx, value, None))
            one = self._any(ctx)
            mean, found = one.state.belief.mean, {}
            for link in ctx.below_of(Predicts):
                mapping = one.bound.cluster.mappings[link]
                at = arguments(one, mapping, mean, known_arguments(one))
                found[link] = mapping.linearise(at[:, None], parameters_of(one, link.child, mean), 1)
            return found

        value, covariance = self._first_belief(ctx)
        return self._start_with(ctx, searched_value(value, linearise, errors), covariance)

    def _any(self, ctx: Context) -> Context:
        """The context of a belief of the state, any of them if there are several."""
        return ctx

    def _started(self, ctx: Context) -> KalmanState:
        return started(ctx)

    def _first_belief(self, ctx: Context) -> tuple[Tensor, Tensor]:
        return first_belief(ctx, ctx.state)

    def _start_with(self, ctx: Context, value: Tensor, covariance: Tensor | None) -> KalmanState:
        """The state with this value (B, dim) and nothing learned; covariance: None if all is certain."""
        return start(ctx, value, covariance)

    def warnings(self, ctx: Context, elements: int) -> Iterator[str]:
        yield from (each for each in (self._too_long_steps(ctx, elements), self._far_start(ctx, elements)) if each)

    def _too_long_steps(self, ctx: Context, elements: int) -> str | None:
        """An explicit step h is unstable where |hλ| of an eigenvalue λ of ∂f/∂x is above a limit."""
        limit = STABLE.get(self.integrator)
        size = 0.0 if limit is None else stability(ctx, elements)
        if limit is None or size <= limit:
            return None
        enough = 2 * self.substeps * size / limit
        further = f", or substeps={math.ceil(enough)}" if enough <= 1000 else ""
        return (
            f"{self.title}: its flow changes too fast for steps of integrator={self.integrator!r} (|λ|dt = {size:.2g}, "
            f"limit {limit:g}); use integrator='local_linearisation'{further}"
        )

    @property
    def has_default_start(self) -> bool:
        """Whether neither `initial_mean` nor `initial_sd` was given."""
        return self.initial_mean is None and bool((self.initial_sd == 1.0).all())

    def _far_start(self, ctx: Context, elements: int) -> str | None:
        """Elements that no mapping depends on start at 0 ± 1 by default, which is too narrow in some units."""
        if not self.has_default_start:
            return None
        belief = ctx.state.belief
        hidden = (all_jacobians(ctx, belief)[..., : self.dim] == 0).all(1).all(0)
        reached = belief.mean[:, : self.dim].abs().reshape(-1, elements, self.dim).median(0).values.amax(0)
        reached = torch.where(hidden & torch.isfinite(reached), reached, 0.0)
        at = int(reached.argmax())
        if reached[at] <= FAR:
            return None
        return (
            f"{self.title}: element {at}, which is not observed, is {reached[at]:.2g}, and was believed to start at "
            "0 ± 1, the defaults; give initial_mean and initial_sd in the units of the state"
        )

    def has_scales(self, bound: KalmanBound) -> bool:
        return any(not block.model.is_white for block in bound.layout.below.values())

    def rescaled(self, bound: KalmanBound, state: KalmanState, weights: Tensor, factor: float) -> KalmanState:
        logs, weight = state.reference.variance.log().reshape(*weights.shape, -1), weights.to(state.reference.variance)
        mean = torch.where(weight[..., None] > 0, weight[..., None] * logs, 0.0).sum(0)
        scale = factor * mean.exp().repeat(len(weight), 1)
        return state._replace(reference=state.reference._replace(scale=scale))

    def first_sd(self, spec: BatchSpec) -> Tensor | None:
        return None if self.initial_mean is None else spec.expand_vector(self.initial_sd, self.dim)

    def start_peaks(self, ctx: Context) -> Peaks | None:
        return None if self.initial_mean is None else peaks_of_start(ctx)

    def start_at(self, bound: KalmanBound, state: KalmanState, offset: Tensor, narrowing: Tensor) -> KalmanState:
        return started_at(bound, state, offset, narrowing)

    def can_bend(self, bound: KalmanBound) -> bool:
        return can_bend(bound)

    def bends(self, ctx: Context) -> Bends:
        return all_bends(ctx)

    def part(self, state: KalmanState, bends: Bends, place: Tensor) -> KalmanState:
        return part_of(state, bends, place)

    def prediction(self, ctx: Context, link: AnyLink) -> GaussianPrediction:
        assert isinstance(link, Predicts)
        sent = ctx.state.sent[ctx.below.index(link)]
        levels = ctx.bound.layout.below[link].levels

        def restricted() -> GaussianPrediction:
            return sent._replace(distribution=sent.distribution.of_levels(levels))

        return ctx.cached(f"prediction of {link.child.name}", restricted, *sent.distribution, sent.lagged_covariance)

    def error(self, ctx: Context, link: AnyLink) -> ScoreError | BlockPosterior | ClusterPosterior:
        evidence, layout = ctx.state.evidence, ctx.bound.layout
        if isinstance(link, Weighs):
            noise = ctx.message(link).noise
            assert noise is not None
            return noise_score_error(evidence.noise.part(layout.own[link].levels), noise.levels)
        if isinstance(link, Drives):
            return no_error(ctx, link) if link.parent.is_input else self._posterior_of_cause(ctx, link)
        assert isinstance(link, Parametrises)
        (block,) = (each for each in layout.all_parameters if each.link is link)
        if block.is_joint:
            belief, place = ctx.state.belief, block.elements
            return BlockPosterior(
                belief.mean[:, place],
                evidence.correction[:, place],
                lambda: belief.covariance_by_source[..., place, place].sum(1),
            )
        score, information = evidence.parameters.part(block.sensitivities)
        return ScoreError(score, lambda: information)

    def _posterior_of_cause(self, ctx: Context, link: Drives) -> ClusterPosterior:
        place, evidence = ctx.bound.cluster.blocks[link.parent], ctx.state.evidence
        above = (each for each in ctx.links.relayed if each.child is link.parent)
        errors = {
            each: self.error(ctx, each)
            for each in above
            if not isinstance(each, Drives) or each in ctx.bound.cluster.links  # inputs receive nothing
        }
        covariance = state_covariance(ctx)[:, place, place]
        mean, change = ctx.state.belief.mean[:, place], evidence.correction[:, place]
        return ClusterPosterior(mean, change, covariance, errors)

    def _own_covariance(self, ctx: Context) -> Tensor:
        return state_covariance(ctx)[:, : self.dim, : self.dim]

    def predict(self, ctx: Context) -> KalmanState:
        """Time update of the belief, and the predictions of the nodes below."""
        ctx.propose(started(ctx))
        state, layout = ctx.state, ctx.bound.layout
        belief, p = state.belief, layout.n_scored
        # the covariance with the previous predictions is carried like a sensitivity, for children with beliefs
        lagged = any(not link.child.observes for link in ctx.below)
        if lagged:
            towards = torch.bmm(belief.covariance, all_jacobians(ctx, belief).mT)
            belief = belief._replace(dmean_dtheta=torch.cat([belief.dmean_dtheta, towards], -1))
        carried_to = belief.dmean_dtheta.shape[-1]
        if ctx.bound.smooth:  # and so is the covariance with the state before
            belief = belief._replace(dmean_dtheta=torch.cat([belief.dmean_dtheta, belief.covariance], -1))
        elapsed = ctx.time_since(state.time).to(belief.mean)
        belief = move_by_need(ctx, belief, elapsed)
        belief = with_new_deviations(belief, layout.inputs)
        carried, cross = belief.dmean_dtheta[..., p:carried_to], belief.dmean_dtheta[..., carried_to:]
        belief = belief._replace(dmean_dtheta=belief.dmean_dtheta[..., :p])
        between = [torch.zeros_like(each.lagged_covariance) for each in state.sent]
        if lagged:
            joint = torch.bmm(all_jacobians(ctx, belief), carried).mT
            places = zip(between, spans(each.distribution.mean.shape[-1] for each in state.sent), strict=True)
            between = [joint[:, here, here] if each.shape[-1] else each for each, here in places]
        update = state.time_update
        if ctx.bound.smooth:
            parts = (update.number + 1, elapsed, belief.mean, belief.covariance, belief.dmean_dtheta, cross)
            update = TimeUpdate(*parts)
        moved = state._replace(belief=belief, time=ctx.time, inputs=inputs_now(ctx), time_update=update)
        return moved._replace(sent=predict_children(ctx, moved, between))

    def update(self, ctx: Context) -> KalmanState:
        """Measurement update with the errors of the nodes below, one node after the other."""
        # what an observation contributed stays until the next one, which for a level of a stack is long after `predict`
        ctx.propose(ctx.state._replace(evidence=tree_map(torch.zeros_like, ctx.state.evidence)))
        for i, link in enumerate(ctx.below_of(Predicts)):
            if i:  # predict again, after the updates so far
                sent = list(ctx.state.sent)
                sent[i] = predict_child(ctx, ctx.state, link, sent[i].lagged_covariance)
                ctx.propose(ctx.state._replace(sent=tuple(sent)))
            ctx.propose(take_in(ctx, link, ctx.state.sent[i].distribution, ctx.error(link).eliminated))
        belief, place = ctx.state.belief, slice(ctx.bound.motion.dim)  # its covariance may overflow, and no part of it
        size = belief.covariance_by_source.diagonal(dim1=-2, dim2=-1)[..., place].sum()  # no other element is larger
        for slope in (belief.dmean_dtheta, belief.dmean_dlogvar[..., ctx.bound.layout.own_levels]):
            if slope.shape[-1]:
                rows = slope[:, place].reshape(1, -1)
                size = size + (rows @ rows.mT).sum()
        if not holds(torch.isfinite(size)):
            ctx.mark_diverged(~torch.isfinite(state_covariance(ctx)).flatten(1).all(1), OVERFLOW)
        return ctx.state

    def retune(self, ctx: Context) -> KalmanState:
        """Correct the belief for parameters and noise levels that have changed."""
        ctx.propose(started(ctx))
        layout, state, reference = ctx.bound.layout, ctx.state, ctx.state.reference
        belief = state.belief
        theta, variance, numbers = scored_parameters(ctx), variances(ctx), transition_numbers(ctx)
        if layout.n_scored:
            belief = follow_scored(ctx, belief, theta, numbers)
        for i, each in enumerate(layout.all_parameters):
            transition = ctx.message(each.link).transition
            if each.is_joint and transition is not None:
                changed = numbers[:, i] != reference.transitions[:, i]
                belief = select(changed, follow_joint(ctx, belief, each, transition), belief)
        if layout.n_levels:
            ratio = variance / reference.variance
            ratio = torch.where(variance > 0, ratio, 1.0).log()  # a likelihood of its own has no variance
            change = ratio @ layout.level_shares
            parts = known_symmetric(belief.covariance_by_source)
            parts = parts * torch.cat([torch.ones_like(change[:, :1]), change.exp()], 1)[..., None, None]
            belief = belief._replace(covariance_by_source=parts)
        learned = any(block.learned_lengthscale for block in layout.noises)
        lengthscale = lengthscales(ctx) if learned else reference.lengthscale
        now = Reference(theta, variance, reference.scale, lengthscale, numbers)
        return state._replace(belief=belief, reference=now)

    @property
    def holds_noise(self) -> bool:
        return self.process_noise == "held"

    def smoothing_layout(self, bound: KalmanBound) -> SmoothingLayout:
        layout, blocks = bound.layout, {node.name: place for node, place in bound.cluster.blocks.items()}
        blocks |= {each.link.parent.name: each.elements for each in layout.all_parameters if each.is_joint}
        found = SmoothingLayout(layout.size, layout.n_scored, blocks, slice(0))
        return found._replace(belief=slice(2, 2 + sum(belief_of(found))))

    def smoothing_row(self, ctx: Context) -> Tensor:
        state = ctx.state
        beside = scored_covariance(ctx) if ctx.bound.layout.n_scored else None
        return pack(state.belief, state.time_update, beside)

    def smoothed(self, rows: Tensor, layout: SmoothingLayout, first_only: bool) -> tuple[Tensor, Tensor]:
        filtered, beside = unpack(rows, layout)
        mean, covariance = (smooth_first if first_only else smooth)(filtered)
        slope = mean[..., 1:]
        return mean[..., 0], covariance + slope @ beside @ slope.mT

    def backward_step(self, later: Tensor, earlier: Tensor, layout: SmoothingLayout) -> Steps:
        filtered, _ = unpack(torch.stack([earlier, later]), layout)
        return backward_steps(filtered).at_row(0)

    def smoothed_by(self, steps: Sequence[Steps], row: Tensor, layout: SmoothingLayout) -> tuple[Tensor, Tensor]:
        filtered, beside = unpack(row[None], layout)
        belief = SmoothedRows(filtered.mean[0], filtered.covariance[0])
        for step in steps:
            belief = step.after(belief)
        slope = belief.mean[..., 1:]
        covariance = 0.5 * (belief.covariance + belief.covariance.mT)
        return belief.mean[..., 0], covariance + slope @ beside @ slope.mT

    def energy(self, ctx: Context) -> Energy:
        """None of its own: the energies of the nodes below are predictive log-likelihoods."""
        return Energy()

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        shape, errors, along, sds = (
            ("order", "dimension"),
            ("error_order", "dimension"),
            ("dimension",),
            standard_deviations,
        )
        return {
            "mean": Recordable(shape, lambda ctx: ctx.state.belief.mean[:, None, : self.dim]),
            "sd": Recordable(shape, self._own_covariance, lambda found: standard_deviations(found)[..., None, :]),
            "covariance": Recordable(("element", "element_"), self._own_covariance),
            "error": Recordable(errors, lambda ctx: ctx.state.evidence.correction[:, None, : self.dim]),
            "weighted_error": Recordable(errors, lambda ctx: ctx.state.evidence.weighted_error[:, None, : self.dim]),
            "velocity": Recordable(along, lambda ctx: derivatives(ctx).velocity[:, : self.dim]),
            "velocity_sd": Recordable(along, lambda ctx: self._own(derivatives(ctx).velocity_covariance), sds),
            "acceleration": Recordable(along, lambda ctx: derivatives(ctx).acceleration[:, : self.dim]),
            "acceleration_sd": Recordable(along, lambda ctx: self._own(derivatives(ctx).acceleration_covariance), sds),
        }

    def _own(self, matrix: Tensor) -> Tensor:
        """The block of this node in a matrix of all nodes of its cluster, (B, dim, dim)."""
        return matrix[:, : self.dim, : self.dim]

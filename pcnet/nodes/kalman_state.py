"""Kalman states: hidden states whose belief is carried from one observation to the next."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, ClassVar, Literal, NamedTuple, final

import torch
from pydantic import Field, SkipValidation
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.functions.base import Function
from pcnet.model.context import Neighbours, NodeContext, Now
from pcnet.model.links import AnyLink, Drives, Parametrises, Predicts, Weighs
from pcnet.model.messages import BlockPosterior, GaussianPrediction, ParameterTransition, PredictionError, ScoreError
from pcnet.model.node import AnyNode, BatchSpec, Energy, ErrorShape, Node, Recordable
from pcnet.model.protocols import (
    ChecksSteps,
    DrawsFutures,
    ForecastsAlone,
    ForecastStart,
    ForecastStep,
    KeepsNoiseScales,
    SmoothingLayout,
    Smooths,
    StartsAtPeaks,
)
from pcnet.nodes.augmented_layout import (
    AugmentedStateLayout,
    NoiseBlock,
    Noises,
    ParameterBlock,
    make_layout,
    repeat_per_channel,
)
from pcnet.nodes.flow import FlowForecasts, check_state, checked_flow, first_value
from pcnet.nodes.input import InputNode
from pcnet.nodes.kalman_inputs import (
    InputPath,
    InputSpec,
    arguments_of,
    further_arguments,
    input_path,
    of_state,
    present_inputs,
    with_input_motion,
    with_new_deviations,
)
from pcnet.nodes.kalman_smoothing import TimeUpdate, no_time_update, pack, unpack
from pcnet.nodes.precision import PrecisionNode, noise_score_error
from pcnet.numerics import kalman
from pcnet.numerics.branching import holds
from pcnet.numerics.coloured_noise import Noise, NoiseModel, NoiseSpec, NoiseTransition
from pcnet.numerics.estimators import Newton, NoiseScoring, ParameterEstimator
from pcnet.numerics.kalman import GaussianWithSensitivities, PredictiveDistribution, ScoreAndInformation
from pcnet.numerics.kernels import SquaredExponential, lengthscale_of
from pcnet.numerics.laplace import standard_deviations
from pcnet.numerics.mixtures import Peaks, bending, split_axes
from pcnet.numerics.sigma_points import Regression, covariance_root, regress, regress_or_keep
from pcnet.numerics.smoothing import smooth, smooth_first
from pcnet.numerics.symmetric import known_symmetric
from pcnet.numerics.transitions import FlowAt, FlowStep, IntegratorName, advance, flow_step
from pcnet.numerics.trees import select, spans, tree_map
from pcnet.settings import PositiveVector, Vector, at_least_1d, check_size, number, settings

MAX_STEPS = 64  # how many times as many integration steps a gap may take
STABLE = {"rk4": 2.7, "euler": 2.0}
"""Largest |hλ| of stable steps."""
POINT_STEPS = 2  # integration steps of a drawn point, in one of the belief: single points may be where a flow is stiff
BENT, SPLIT_AXES = 0.5, 2
"""A first belief is divided along elements where mappings have so much second-order variance, at most so many."""
OVERFLOW = "covariance overflowed; pass NaN for outliers, or use on_divergence='hold'"


class Reference(NamedTuple):
    """The parameters and noises that the belief was computed with."""

    parameters: Tensor  # those that are not part of the belief, (B, p)
    variance: Tensor  # (B, all channels)
    scale: Tensor  # of the variance, as it was first guessed or found since, (B, all channels)
    lengthscale: Tensor  # (B, noises)
    transitions: Tensor  # number of the last transition of the parameters of each link, (B, links)


class Evidence(NamedTuple):
    """What the last observation contributed."""

    parameters: ScoreAndInformation  # of the parameters that are not part of the belief, p
    noise: ScoreAndInformation  # of the own log-variances, o
    correction: Tensor  # change of the mean of state and parameters, (B, q)
    weighted_error: Tensor  # Σ Cᵀξ, (B, dim)


class KalmanState(NamedTuple):
    """The belief about the augmented state; what it was computed with; and what was sent and received.

    A prediction stays in force until the next time update, which for a level of a stack is many observations later.
    """

    belief: GaussianWithSensitivities
    reference: Reference
    sent: tuple[GaussianPrediction, ...]  # the last prediction of each node below, in the order of the links
    evidence: Evidence
    time: Tensor  # of the last time update, (B,), in double precision
    inputs: Tensor  # all known inputs at that time, (B, m)
    time_update: TimeUpdate  # the last one, for a smoother


class KalmanBound(NamedTuple):
    """Constants of a run; mean and variance of the first state are (B, dim)."""

    layout: AugmentedStateLayout
    initial_mean: Tensor
    initial_variance: Tensor
    smooth: bool  # whether what a smoother needs is kept


Context = NodeContext[KalmanState, KalmanBound]


@final
@settings
class KalmanStateNode(
    Node[KalmanState, KalmanBound],
    FlowForecasts,
    ForecastsAlone,
    DrawsFutures,
    ChecksSteps,
    KeepsNoiseScales,
    StartsAtPeaks,
    Smooths,
):
    """A hidden state (..., dim) that carries mean and covariance from one observation to the next.

    `predict` is the time update along the flow ẋ = f(x, u, θ, t) + ω, `update` the measurement update with the errors
    of the nodes below, one node after the other; `retune` rescales the covariance to noise levels that have changed.
    Parameters without an estimator of their own are part of the belief, and are learned at every observation. For
    linear flows and mappings this is the Kalman filter, otherwise an extended or unscented one.

    White process noise is a diffusion: its standard deviation is in units of the state per √time, so that the belief
    does not depend on the number of steps. Smooth noise is carried in generalised coordinates, a noise and its motion.
    Several precision nodes may weigh the state: its noise is the sum of theirs. Inputs u are those of `InputNode`s that
    drive the state.

    Args:
        dim: Dimension.
        flow: Function of (state, parameters), (state, inputs, parameters) or (state, inputs, parameters, time), or a
            `Function` with its own derivatives. So are mappings.
        initial_mean: State at the first observation, (..., dim); found from that observation unless given.
        initial_sd: Its standard deviation, one number or (..., dim).
        integrator: "rk4"; "local_linearisation" for stiff flows; or "euler", to match a process simulated that way.
        substeps: Integration steps between two observations; a gap takes more of them, in proportion.
        linearisation: How means and covariances pass through flow and mappings: "unscented", by regression on points
            that represent the belief; or "taylor", by derivatives at its mean.
        process_noise: White noise as "diffusion", or "held" constant between two observations, as a part of ẋ.
        orders: Orders of motion of smooth noise: a squared-exponential one is carried by orders − 1 coordinates. A
            Matérn noise of smoothness n − 1/2 has n in any case.
        learn_noise: Whether precision nodes receive scores; False costs less.
    """

    _: KW_ONLY
    dim: int = Field(ge=1)
    flow: SkipValidation[Any]
    initial_mean: Vector | None = None
    initial_sd: PositiveVector = number(1.0)
    integrator: IntegratorName = "rk4"
    substeps: int = Field(default=1, ge=1)
    linearisation: Literal["unscented", "taylor"] = "unscented"
    process_noise: Literal["diffusion", "held"] = "diffusion"
    orders: int = Field(default=6, ge=2)
    learn_noise: bool = True
    role: ClassVar[str] = "state"
    kind: ClassVar[str] = "state"
    parent_of: ClassVar[tuple[type[AnyLink], ...]] = (Predicts,)
    child_of: ClassVar[tuple[type[AnyLink], ...]] = (Drives, Parametrises, Weighs)
    sends_covariance: ClassVar[bool] = True
    joins_parameters: ClassVar[bool] = True
    multiple_noises: ClassVar[bool] = True
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
        super().check_as_parent(link)
        shape = link.child.error_shape
        if shape is not None and shape.rows != 1:
            raise GraphError(f"{self.title} predicts values only: give {link.child.name!r} one order, orders=1")

    def check_as_child(self, link: AnyLink) -> None:
        if isinstance(link, Predicts) or (isinstance(link, Drives) and not isinstance(link.parent, InputNode)):
            raise GraphError(
                f"{self.title} cannot be the child in {link.parent.name!r} {link.key} {self.name!r}; use a "
                "GeneralisedStateNode, an InputNode that drives it, or make the cause part of the state"
            )
        super().check_as_child(link)

    def depends_on_time(self, links: Neighbours) -> bool:
        return any(each.takes_time for each in (self.flow, *(link.function for link in links.below_of(Predicts))))

    def check(self, links: Neighbours, like: Tensor) -> None:
        check_state(self, self.dim, self.flow, links, like, knows_time=True)

    def default_estimator(self, link: AnyLink, above: tuple[AnyLink, ...]) -> ParameterEstimator | None:
        if isinstance(link, Parametrises):
            return Newton()
        return NoiseScoring() if self.learn_noise else None

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
        of = (None, *(link.child for link in links.below))
        parameters = {each: links.above_of(Parametrises, each) for each in of}
        try:
            noises = Noises(own, below, self.orders, self.learn_noise)
            inputs = {link: self._input_spec(link, spec) for link in links.above_of(Drives)}
            layout = make_layout(self.dim, noises, parameters, inputs, links.joint, spec.zeros())
        except SettingError as error:
            raise GraphError(f"{self.title}: {error}") from None
        mean = spec.zeros(self.dim) if self.initial_mean is None else spec.expand(self.initial_mean, 1)
        return KalmanBound(layout, mean, spec.expand_vector(self.initial_sd, self.dim) ** 2, links.smooth)

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
        mean = torch.constant_pad_nd(bound.initial_mean, (0, n - self.dim))
        parts = zeros(1 + s, n, n)
        parts[:, 0, : self.dim, : self.dim] = bound.initial_variance.diag_embed()
        belief = GaussianWithSensitivities(mean, parts, zeros(n, p), zeros(n, s))
        sent = []
        for block in layout.below.values():
            d = block.channels.stop - block.channels.start
            distribution = PredictiveDistribution(zeros(d), zeros(d, d), zeros(d, s), zeros(s, d, d))
            sent.append(GaussianPrediction(distribution, zeros(d, d)))
        channels, numbers = zeros(layout.level_channels.shape[1]), zeros(len(layout.all_parameters))
        reference = Reference(zeros(p), channels, channels, zeros(len(layout.noises)), numbers)
        of_parameters, of_noise = (ScoreAndInformation(zeros(n), zeros(n, n)) for n in (p, o))
        evidence = Evidence(of_parameters, of_noise, zeros(layout.joint.stop), zeros(self.dim))
        inputs = zeros(sum(block.spec.dim for block in layout.inputs))
        update = no_time_update(spec, n if bound.smooth else 0, p)
        return KalmanState(belief, reference, tuple(sent), evidence, zeros().double(), inputs, update)

    def initialise(self, ctx: Context) -> KalmanState:
        """Find the first value from the first observation, unless it is given; its uncertainty is `initial_sd`."""
        ctx.propose(self._started(ctx))
        if self.initial_mean is not None:
            return ctx.state

        def errors(value: Tensor) -> dict[Predicts, PredictionError]:
            ctx.propose(self._start(ctx, value, None))
            return {link: ctx.error(link) for link in ctx.below_of(Predicts)}

        value, spread = self._first_belief(ctx.state)
        ctx.propose(self._start(ctx, value, None))
        mappings = {}
        for link in ctx.below_of(Predicts):
            theta = self._parameters_of(ctx, link.child, ctx.state.belief.mean)
            at = self._arguments(ctx, link.function, ctx.state.belief.mean, self._known(ctx))
            mappings[link] = link.function.linearise(at[:, None], theta, 1)
        return self._start(ctx, first_value(value, mappings, errors), spread)

    def _started(self, ctx: Context) -> KalmanState:
        """The state, with batch elements that have not started yet starting at their first value."""
        state = ctx.state
        fresh = ctx.cached("fresh", lambda: (state.reference.variance == 0).all(1), state.reference.variance)
        if not ctx.cached("any fresh", lambda: holds(fresh.any()), fresh):
            return state
        return select(fresh, self._start(ctx, *self._first_belief(state)), state)

    def _first_belief(self, state: KalmanState) -> tuple[Tensor, Tensor]:
        """Mean (B, dim) and covariance (B, dim, dim) that a state starts with."""
        here = slice(self.dim)
        return state.belief.mean[:, here], state.belief.covariance_by_source[:, 0, here, here]

    def _start(self, ctx: Context, value: Tensor, spread: Tensor | None) -> KalmanState:
        """The state with this value (B, dim) and nothing learned; spread: its covariance, None if all is certain."""
        layout, state = ctx.bound.layout, ctx.state
        variances = self._variances(ctx)
        mean = torch.constant_pad_nd(value, (0, layout.size - self.dim))
        parts = torch.zeros_like(state.belief.covariance_by_source)
        if spread is not None:
            parts[:, 0, : self.dim, : self.dim] = spread
        for each in layout.all_parameters:
            if each.is_joint:
                mean[:, each.elements] = ctx.message(each.link).value
                if spread is not None:
                    parts[:, 0, each.elements, each.elements] = ctx.message(each.link).covariance
        for block in layout.noises:
            variance = layout.by_source(block, variances[:, block.channels]).repeat(1, 1, block.model.n_latents)
            parts[..., block.latents, block.latents].diagonal(dim1=-2, dim2=-1).copy_(variance)
        numbers = self._transition_numbers(ctx)
        guesses = [each.variance if each.first_guess is None else each.first_guess for each in self._noises(ctx)]
        guess, lengthscales = torch.cat(guesses, 1), self._lengthscales(ctx)
        reference = Reference(self._scored_parameters(ctx), variances, guess, lengthscales, numbers)
        nothing = tree_map(torch.zeros_like, state)
        belief = nothing.belief._replace(mean=mean, covariance_by_source=parts)
        started = nothing._replace(
            belief=belief if spread is None else with_new_deviations(belief, layout.inputs),
            reference=reference,
            time=ctx.time,
            inputs=self._present_inputs(ctx),
        )
        none = [each.lagged_covariance for each in nothing.sent]
        return started._replace(sent=self._predictions(ctx, started, none))

    def too_long(self, ctx: Context) -> str | None:
        """An explicit step h is unstable where |hλ| of an eigenvalue λ of ∂f/∂x is above a limit."""
        limit = STABLE.get(self.integrator)
        mean, state = ctx.state.belief.mean, ctx.state
        if limit is None or not bool(torch.isfinite(mean).all()):
            return None
        inputs = torch.cat([state.inputs, state.time.to(mean)[:, None]], 1)
        start = self._arguments(ctx, self.flow, mean, inputs)
        found = self.flow.linearise(start[:, None], self._parameters_of(ctx, None, mean), 1).jacobian
        jacobian = found.expand(len(mean), self.dim, start.shape[-1])[..., : self.dim]
        rates = torch.linalg.eigvals(torch.nan_to_num(jacobian)).abs().amax(-1)
        size = float((ctx.dt * rates / self.substeps).median())
        if size <= limit:
            return None
        enough = math.ceil(2 * self.substeps * size / limit)
        return (
            f"{self.title}: its flow changes too fast for steps of integrator={self.integrator!r} (|λ|dt = {size:.2g}, "
            f"limit {limit:g}); use integrator='local_linearisation', or substeps={enough}"
        )

    def has_scales(self, bound: KalmanBound) -> bool:
        return any(not block.model.is_white for block in bound.layout.below.values())

    def rescaled(self, bound: KalmanBound, state: KalmanState, weights: Tensor, factor: float) -> KalmanState:
        logs = state.reference.variance.log().reshape(*weights.shape, -1)
        mean = torch.where(weights[..., None] > 0, weights[..., None] * logs, 0.0).sum(0)
        scale = factor * mean.exp().repeat(len(weights), 1)
        return state._replace(reference=state.reference._replace(scale=scale))

    def start_peaks(self, ctx: Context) -> Peaks | None:
        bound, d = ctx.bound, self.dim
        mappings = {link: link.function for link in ctx.below_of(Predicts)}
        known = {link for link, each in mappings.items() if each.is_affine or each.takes_causes or each.takes_time}
        curved = [link for link in mappings if link not in known]
        if self.initial_mean is None or not curved:
            return None
        largest = torch.zeros_like(bound.initial_mean[0])
        for link in curved:
            blocks = bound.layout.parameters[link.child]
            theta = [ctx.message(each.link).value for each in blocks]
            fixed = torch.cat(theta, -1) if theta else bound.initial_mean[:, :0]

            def at(points: Tensor, link: Predicts = link, fixed: Tensor = fixed) -> Tensor:
                return link.function(points, fixed[:, None].expand(*points.shape[:-1], -1))

            found = bending(at, bound.initial_mean, bound.initial_variance.sqrt())
            largest = torch.maximum(largest, found.amax(0))
        axes = [int(i) for i in largest.argsort(descending=True)[:SPLIT_AXES] if largest[i] > BENT]
        return split_axes(axes, bound.initial_mean[0, :d]) if axes else None

    def start_at(self, bound: KalmanBound, state: KalmanState, offset: Tensor, narrowing: Tensor) -> KalmanState:
        mean, parts = state.belief.mean.clone(), state.belief.covariance_by_source.clone()
        mean[:, : self.dim] = bound.initial_mean + offset * bound.initial_variance.sqrt()
        parts[:, 0, : self.dim, : self.dim] = (bound.initial_variance * narrowing**2).diag_embed()
        return state._replace(belief=state.belief._replace(mean=mean, covariance_by_source=parts))

    def prediction(self, ctx: Context, link: AnyLink) -> GaussianPrediction:
        assert isinstance(link, Predicts)
        sent = ctx.state.sent[ctx.below.index(link)]
        levels = ctx.bound.layout.below[link].levels

        def restricted() -> GaussianPrediction:
            return sent._replace(distribution=sent.distribution.of_levels(levels))

        return ctx.cached(f"prediction of {link.child.name}", restricted, *sent.distribution, sent.lagged_covariance)

    def error(self, ctx: Context, link: AnyLink) -> ScoreError | BlockPosterior:
        evidence, layout = ctx.state.evidence, ctx.bound.layout
        if isinstance(link, Weighs):
            noise = ctx.message(link).noise
            assert noise is not None
            return noise_score_error(evidence.noise.part(layout.own[link].levels), noise.levels)
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

    def predict(self, ctx: Context) -> KalmanState:
        """Time update of the belief, and the predictions of the nodes below."""
        ctx.propose(self._started(ctx))
        state, layout = ctx.state, ctx.bound.layout
        belief, p = state.belief, layout.n_scored
        # the covariance with the previous predictions is carried like a sensitivity, for children with beliefs
        lagged = any(not link.child.observes for link in ctx.below)
        if lagged:
            towards = torch.bmm(belief.covariance, self._jacobians(ctx, belief).mT)
            belief = belief._replace(dmean_dtheta=torch.cat([belief.dmean_dtheta, towards], -1))
        carried_to = belief.dmean_dtheta.shape[-1]
        if ctx.bound.smooth:  # and so is the covariance with the state before
            belief = belief._replace(dmean_dtheta=torch.cat([belief.dmean_dtheta, belief.covariance], -1))
        elapsed = (ctx.time - state.time).to(belief.mean)
        belief = self._move(ctx, belief, elapsed, self._steps(ctx))
        belief = with_new_deviations(belief, layout.inputs)
        carried, cross = belief.dmean_dtheta[..., p:carried_to], belief.dmean_dtheta[..., carried_to:]
        belief = belief._replace(dmean_dtheta=belief.dmean_dtheta[..., :p])
        between = [torch.zeros_like(each.lagged_covariance) for each in state.sent]
        if lagged:
            joint = torch.bmm(self._jacobians(ctx, belief), carried).mT
            between = [joint[:, here, here] for here in spans(each.shape[-1] for each in between)]
        nothing = tree_map(torch.zeros_like, state.evidence)
        update = state.time_update
        if ctx.bound.smooth:
            parts = (update.number + 1, elapsed, belief.mean, belief.covariance, belief.dmean_dtheta, cross)
            update = TimeUpdate(*parts)
        moved = state._replace(
            belief=belief, evidence=nothing, time=ctx.time, inputs=self._present_inputs(ctx), time_update=update
        )
        return moved._replace(sent=self._predictions(ctx, moved, between))

    def _steps(self, ctx: Context) -> int:
        """Number of integration steps: `substeps`, and in a gap twice as many, four times, …, so that none is long."""
        more = 1
        if ctx.relative_dt is not None:
            while more < MAX_STEPS and holds((ctx.relative_dt > 1.5 * more).any()):
                more *= 2
        return self.substeps * more

    def _move(
        self, ctx: Context, belief: GaussianWithSensitivities, elapsed: Tensor, steps: int
    ) -> GaussianWithSensitivities:
        """The belief after a time (B,), in so many integration steps."""
        layout, d, dt = ctx.bound.layout, self.dim, elapsed / steps
        eye = torch.eye(d, dtype=dt.dtype, device=dt.device).expand(len(dt), d, d)
        gain = torch.zeros_like(eye)  # of white noise that is held constant over all steps
        coloured = [block for block in layout.noises if not block.model.is_white]
        transitions = {block.place: self._noise_model(ctx, block).transition(dt) for block in coloured}
        state = ctx.state
        path = input_path(layout.inputs, state.inputs, self._present_inputs(ctx), state.time, elapsed)
        for _ in range(steps):
            belief, step = self._step(ctx, belief, dt, transitions, path)
            path = path.after(dt)
            gain = step.jacobian @ gain + step.integrate(eye, eye, eye)
        if self.process_noise == "held":
            by_source = self._white_noise(ctx)
            parts = belief.covariance_by_source.clone()
            parts[..., :d, :d] += (gain[:, None] * by_source[:, :, None]) @ gain.mT[:, None]
            belief = belief._replace(covariance_by_source=parts)
        return belief

    def _step(
        self,
        ctx: Context,
        belief: GaussianWithSensitivities,
        dt: Tensor,
        transitions: Mapping[int, NoiseTransition],
        path: InputPath,
    ) -> tuple[GaussianWithSensitivities, FlowStep]:
        """One integration step of state, parameters and noises."""
        layout, d, variance = ctx.bound.layout, self.dim, ctx.state.reference.variance
        own = {block.place for block in layout.own.values()}
        step, regression = self._flow_step(ctx, belief, dt, path)
        change = regression.value - belief.mean[:, :d]
        jacobian = torch.constant_pad_nd(regression.jacobian, (0, layout.size - regression.jacobian.shape[-1]))
        jacobian[..., :d].diagonal(dim1=-2, dim2=-1).sub_(1.0)
        for block in layout.own.values():
            if block.place in transitions:
                moved = transitions[block.place]
                first = torch.zeros_like(moved.matrix[:, :1])
                first[..., 0] = 1.0
                rows = (repeat_per_channel(row, d) for row in (first, moved.half[:, :1], moved.matrix[:, :1]))
                jacobian[..., block.latents] = step.integrate(*rows)
                change = change + torch.bmm(jacobian[..., block.latents], belief.mean[:, block.latents, None])[..., 0]
        noise = step.diffuse(self._white_noise(ctx) * (self.process_noise == "diffusion"))
        if regression.residual is not None:
            noise[:, 0] += regression.residual
        dtheta = belief.dmean_dtheta.new_zeros(len(dt), d, belief.dmean_dtheta.shape[-1])
        for each in layout.parameters[None]:
            if not each.is_joint:
                dtheta[..., each.sensitivities] = step.parameter_jacobian[..., each.columns]
        belief = kalman.predict(belief, change, jacobian, dtheta, noise)
        for each in layout.all_parameters:
            if each.is_joint:
                walk = dt[:, None] * ctx.message(each.link).walk
                belief = kalman.add_variance(belief, each.elements, walk)
        for block in layout.noises:
            if block.place in transitions:
                moved = transitions[block.place]
                added = layout.coordinates_by_source(block, variance[:, block.channels], moved.covariance)
                belief = kalman.transform(belief, block.latents, moved.matrix, added)
                if block.place in own and step.second_half is not None:
                    # new noise has acted on the state by half of its value at the end
                    belief = kalman.couple(belief, slice(d), block.latents, added[..., :d, :], 0.5 * dt)
        return belief, step

    def _white_noise(self, ctx: Context) -> Tensor:
        """Variance of the white process noise by source, (B, 1 + s, dim)."""
        layout, variance = ctx.bound.layout, ctx.state.reference.variance
        found = variance.new_zeros(len(variance), 1 + layout.n_levels, self.dim)
        for block in layout.own.values():
            if block.model.is_white:
                found = found + layout.by_source(block, variance[:, block.channels])
        return found

    def _flow_step(
        self, ctx: Context, belief: GaussianWithSensitivities, dt: Tensor, path: InputPath
    ) -> tuple[FlowStep, Regression]:
        """A step of the flow, and the same as a function of state, joint parameters and deviations of inputs.

        Inputs that the flow takes, and the time, move along like states whose velocity is known.

        In a gap of so many intervals that even MAX_STEPS are long, by local linearisation, which stays stable.
        """
        layout, d, mean = ctx.bound.layout, self.dim, belief.mean
        integrator = self.integrator
        if ctx.relative_dt is not None and holds((ctx.relative_dt > 1.5 * MAX_STEPS).any()):
            integrator = "local_linearisation"
        theta = self._parameters_of(ctx, None, mean)

        start = self._arguments(ctx, self.flow, mean, path.value)
        motion = further_arguments(self.flow, path.velocity)

        def at(x: Tensor) -> FlowAt:
            found = self.flow.linearise(x[:, None], theta, 1)
            slope = x.new_zeros(len(x), d, 0)
            if theta.shape[-1]:
                slope = self.flow.parameter_slope(x[:, None], theta, 1)[:, 0]
            here = FlowAt(found.value[:, 0], found.jacobian.expand(len(x), d, x.shape[-1]), slope)
            return with_input_motion(here, motion)

        step = of_state(flow_step(at, start, dt, integrator), d)
        taylor = self._joint_taylor(ctx, None, step.value, step.jacobian, step.parameter_jacobian)
        if self.linearisation == "taylor" or self.flow.is_affine:
            return step, taylor
        jacobian = at(start).jacobian if integrator == "local_linearisation" else None

        def after(points: Tensor) -> Tensor:
            return self._advanced(ctx, points, dt, path, integrator, jacobian)

        covariance = belief.covariance[:, layout.joint, layout.joint]
        found = regress_or_keep(after, mean[:, layout.joint], covariance, taylor)
        return step.regressed(found.value, found.jacobian[..., :d]), found

    def _advanced(
        self,
        ctx: Context,
        points: Tensor,
        dt: Tensor,
        path: InputPath,
        integrator: IntegratorName,
        jacobian: Tensor | None = None,
        drive: Tensor | None = None,
    ) -> Tensor:
        """States (B, k, dim) after a step from some points (B, k, n); drive: a constant part of the velocity."""
        parameters = self._parameters_of(ctx, None, points)
        first = self._arguments(ctx, self.flow, points, path.value)
        further = further_arguments(self.flow, path.velocity)[:, None].expand(*points.shape[:-1], -1)

        def velocity(x: Tensor) -> Tensor:
            own = self.flow(x, parameters)
            own = own if drive is None else own + drive
            return torch.cat([own, further], -1) if further.shape[-1] else own

        return advance(velocity, first, dt, integrator, jacobian)[..., : self.dim]

    def _mapping(self, ctx: Context, belief: GaussianWithSensitivities, link: Predicts) -> Regression:
        """The mapping to a node below, as a function of state, joint parameters and deviations of inputs."""
        mean, d, joint = belief.mean, self.dim, ctx.bound.layout.joint
        theta, known = self._parameters_of(ctx, link.child, mean), self._known(ctx)

        def compute() -> Regression:
            if self.linearisation == "unscented" and not link.function.is_affine:

                def at(points: Tensor) -> Tensor:
                    parameters = self._parameters_of(ctx, link.child, points)
                    return link.function(self._arguments(ctx, link.function, points, known), parameters)

                return regress(at, mean[:, joint], belief.covariance[:, joint, joint])
            arguments = self._arguments(ctx, link.function, mean, known)[:, None]
            found = link.function.linearise(arguments, theta, 1)
            jacobian = found.jacobian.expand(len(mean), -1, arguments.shape[-1])
            slope = jacobian[..., d:]
            if theta.shape[-1]:
                slope = torch.cat([link.function.parameter_slope(arguments, theta, 1)[:, 0], slope], -1)
            return self._joint_taylor(ctx, link.child, found.value[:, 0], jacobian[..., :d], slope)

        keys = (mean, belief.covariance_by_source, theta, ctx.state.inputs, ctx.state.time)
        return ctx.cached(f"mapping to {link.child.name}", compute, *keys)

    def _known(self, ctx: Context) -> Tensor:
        """The inputs at the last time update and, last, its time; (B, m + 1)."""
        state = ctx.state
        return torch.cat([state.inputs, state.time.to(state.inputs)[:, None]], 1)

    def _present_inputs(self, ctx: Context) -> Tensor:
        return present_inputs(ctx, ctx.bound.layout.inputs, ctx.state.inputs)

    def _arguments(self, ctx: Context, function: Function, points: Tensor, known: Tensor) -> Tensor:
        return arguments_of(function, ctx.bound.layout.inputs, self.dim, points, known)

    def _joint_taylor(
        self, ctx: Context, of: AnyNode | None, value: Tensor, jacobian: Tensor, parameter_jacobian: Tensor
    ) -> Regression:
        """Derivatives of a function in the state, its parameters and inputs, as those in what the belief is about."""
        layout = ctx.bound.layout
        whole = torch.constant_pad_nd(jacobian, (0, layout.joint.stop - self.dim))
        for each in layout.parameters[of]:
            if each.is_joint:
                whole[..., each.elements] = parameter_jacobian[..., each.columns]
        n = sum(each.columns.stop - each.columns.start for each in layout.parameters[of])
        if parameter_jacobian.shape[-1] > n:
            for block in layout.inputs:
                if block.is_uncertain:
                    whole[..., block.elements] = parameter_jacobian[..., n:][..., block.columns]
        return Regression(value, whole, None)

    def _parameters_of(self, ctx: Context, of: AnyNode | None, points: Tensor) -> Tensor:
        """θ of the flow, or of the mapping to `of`: from the belief at some points (B, ..., n), or from messages."""
        found = []
        for each in ctx.bound.layout.parameters[of]:
            if each.is_joint:
                found.append(points[..., each.elements])
            else:
                value = ctx.message(each.link).value
                found.append(value.view(len(value), *(1,) * (points.dim() - 2), -1).expand(*points.shape[:-1], -1))
        return torch.cat(found, -1) if found else points.new_zeros(*points.shape[:-1], 0)

    def update(self, ctx: Context) -> KalmanState:
        """Measurement update with the errors of the nodes below, one node after the other."""
        layout = ctx.bound.layout
        for i, link in enumerate(ctx.below_of(Predicts)):
            if i:  # predict again, after the updates so far
                sent = list(ctx.state.sent)
                sent[i] = self._predict_child(ctx, ctx.state, link, sent[i].lagged_covariance)
                ctx.propose(ctx.state._replace(sent=tuple(sent)))
            state = ctx.state
            belief, evidence = state.belief, state.evidence
            error = ctx.error(link).eliminated
            weighted, precision = error.weighted[:, 0], error.precision.dense()
            mapping = self._mapping(ctx, belief, link)
            jacobian, direct = self._jacobian(ctx, link, mapping), self._direct(ctx, belief, link)
            noise = None
            if error.noise is not None and error.noise.levels:
                noise = self._observation_noise(ctx, layout.below[link])
                noise = noise if error.noise_inflation is None else noise * error.noise_inflation[:, None]
            if layout.n_scored:
                score = kalman.parameter_score(jacobian, belief.dmean_dtheta, direct, weighted, precision)
                evidence = evidence._replace(parameters=evidence.parameters.plus(score))
            if layout.own_levels.stop:
                distribution = state.sent[i].distribution.of_levels(layout.own_levels)
                raw = torch.bmm(distribution.covariance, weighted[..., None])[..., 0]
                score = kalman.noise_score(distribution, raw, weighted, precision)
                evidence = evidence._replace(noise=evidence.noise.plus(score))
            updated = kalman.update(belief, jacobian, direct, weighted, precision, noise, mapping.residual)
            evidence = evidence._replace(
                correction=evidence.correction + (updated.mean - belief.mean)[:, layout.joint],
                weighted_error=evidence.weighted_error + torch.bmm(weighted[:, None], jacobian[..., : self.dim])[:, 0],
            )
            ctx.propose(state._replace(belief=updated, evidence=evidence))
        belief = ctx.state.belief  # whose covariance may overflow, although its parts are finite
        size = belief.covariance.sum()
        size = size + belief.dmean_dtheta.square().sum() + belief.dmean_dlogvar.square().sum()
        if not holds(torch.isfinite(size)):
            ctx.mark_diverged(~torch.isfinite(self.covariance(ctx)).flatten(1).all(1), OVERFLOW)
        return ctx.state

    def retune(self, ctx: Context) -> KalmanState:
        """Correct the belief for parameters and noise levels that have changed."""
        ctx.propose(self._started(ctx))
        layout, state, reference = ctx.bound.layout, ctx.state, ctx.state.reference
        belief = state.belief
        theta, variance, numbers = self._scored_parameters(ctx), self._variances(ctx), self._transition_numbers(ctx)
        if layout.n_scored:
            belief = self._follow_scored(ctx, belief, theta, numbers)
        for i, each in enumerate(layout.all_parameters):
            transition = ctx.message(each.link).transition
            if each.is_joint and transition is not None:
                changed = numbers[:, i] != reference.transitions[:, i]
                belief = select(changed, self._follow_joint(ctx, belief, each, transition), belief)
        if layout.n_levels:
            ratio = (variance / reference.variance).log()  # the same for all channels of a level
            ratio = torch.where(variance > 0, ratio, 0.0)  # a likelihood of its own has no variance
            change = ratio @ layout.level_channels.mT / layout.level_channels.sum(1)
            parts = known_symmetric(belief.covariance_by_source)
            parts = torch.cat([parts[:, :1], parts[:, 1:] * change.exp()[..., None, None]], 1)
            belief = belief._replace(covariance_by_source=parts)
        now = Reference(theta, variance, reference.scale, self._lengthscales(ctx), numbers)
        return state._replace(belief=belief, reference=now)

    def _follow_joint(
        self, ctx: Context, belief: GaussianWithSensitivities, block: ParameterBlock, transition: ParameterTransition
    ) -> GaussianWithSensitivities:
        """The belief with parameters θ of it replaced by their successors θ⁺ = η⁺ + B(θ − m) + ε.

        With v₀ and v₁ the covariances of θ and θ⁺, and c = gain v₁ between them: B = cᵀv₀⁻¹, Var ε = v₁ − Bv₀Bᵀ.
        """
        message, place = ctx.message(block.link), block.elements
        v0, v1 = belief.covariance[:, place, place], message.covariance
        matrix = torch.linalg.solve(v0, transition.gain @ v1).mT
        noise = torch.zeros_like(belief.covariance_by_source[..., place, place])
        noise[:, 0] = v1 - matrix @ v0 @ matrix.mT
        moved = kalman.transform(belief, place, matrix, noise)
        mean = moved.mean.clone()
        mean[:, place] = message.value
        return moved._replace(mean=mean)

    def _follow_scored(
        self, ctx: Context, belief: GaussianWithSensitivities, theta: Tensor, numbers: Tensor
    ) -> GaussianWithSensitivities:
        """The belief corrected for parameters with sensitivities that were updated, and that have moved on since."""
        layout, reference, dtheta = ctx.bound.layout, ctx.state.reference, belief.dmean_dtheta
        target = theta.clone()
        gain = torch.eye(layout.n_scored, dtype=theta.dtype, device=theta.device).repeat(len(theta), 1, 1)
        residual = torch.zeros_like(gain)
        for i, each in enumerate(layout.all_parameters):
            transition, part = ctx.message(each.link).transition, each.sensitivities
            if not each.is_joint and transition is not None:
                changed = numbers[:, i] != reference.transitions[:, i]
                column, matrix = changed[:, None], changed[:, None, None]
                target[:, part] = torch.where(column, transition.mean, target[:, part])
                gain[:, part, part] = torch.where(matrix, transition.gain, gain[:, part, part])
                residual[:, part, part] = torch.where(matrix, transition.residual_covariance, 0.0)
        mean = belief.mean + torch.bmm(dtheta, (target - reference.parameters)[..., None])[..., 0]
        parts = belief.covariance_by_source
        parts = torch.cat([parts[:, :1] + (dtheta @ residual @ dtheta.mT)[:, None], parts[:, 1:]], 1)
        return belief._replace(mean=mean, covariance_by_source=parts, dmean_dtheta=dtheta @ gain)

    def _predictions(self, ctx: Context, state: KalmanState, lagged: list[Tensor]) -> tuple[GaussianPrediction, ...]:
        pairs = zip(ctx.below_of(Predicts), lagged, strict=True)
        return tuple(self._predict_child(ctx, state, link, each) for link, each in pairs)

    def _predict_child(self, ctx: Context, state: KalmanState, link: Predicts, lagged: Tensor) -> GaussianPrediction:
        """The predictive distribution of a node below, from this state."""
        belief, at = state.belief, ctx.at(state, ctx.now)
        block = ctx.bound.layout.below[link]
        mapping = self._mapping(at, belief, link)
        jacobian = self._jacobian(at, link, mapping)
        mean = mapping.value + torch.bmm(jacobian[..., block.latents], belief.mean[:, block.latents, None])[..., 0]
        noise = self._observation_noise(at, block)
        return GaussianPrediction(kalman.predict_observation(belief, mean, jacobian, noise, mapping.residual), lagged)

    def _noise_model(self, ctx: Context, block: NoiseBlock) -> NoiseModel:
        lengthscale = ctx.state.reference.lengthscale[:, block.place]
        return block.model.with_lengthscale(lengthscale) if block.learned_lengthscale else block.model

    def _observation_noise(self, ctx: Context, block: NoiseBlock) -> Tensor:
        """Variance of the white part of an observation noise, by source; (B, 1 + s, d).

        What a coloured noise needs of it has no source, so that it is not mistaken for less noise.
        """
        layout, reference = ctx.bound.layout, ctx.state.reference
        variance = reference.variance[:, block.channels]
        if block.model.is_white:
            return layout.by_source(block, variance)
        rest = self._noise_model(ctx, block).rest(ctx.dt)[:, None] * reference.scale[:, block.channels]
        return torch.constant_pad_nd(rest[:, None], (0, 0, 0, layout.n_levels))

    def _jacobian(self, ctx: Context, link: Predicts, mapping: Regression) -> Tensor:
        """∂g/∂s of a node below, with the coordinates of its noise; (B, d, n)."""
        layout, d = ctx.bound.layout, mapping.jacobian.shape[1]
        jacobian = torch.constant_pad_nd(mapping.jacobian, (0, layout.size - mapping.jacobian.shape[-1]))
        first = layout.below[link].latents
        if first.stop > first.start:
            jacobian[..., first.start : first.start + d].diagonal(dim1=-2, dim2=-1).add_(1.0)
        return jacobian

    def _jacobians(self, ctx: Context, belief: GaussianWithSensitivities) -> Tensor:
        """∂g/∂s of all nodes below, without observation noise; (B, all d, n)."""
        found = torch.cat([self._mapping(ctx, belief, link).jacobian for link in ctx.below_of(Predicts)], 1)
        return torch.constant_pad_nd(found, (0, ctx.bound.layout.size - found.shape[-1]))

    def _direct(self, ctx: Context, belief: GaussianWithSensitivities, link: Predicts) -> Tensor | None:
        """∂g/∂θ of a mapping at a fixed state, (B, d, p), for parameters with sensitivities."""
        layout = ctx.bound.layout
        blocks = [each for each in layout.parameters[link.child] if not each.is_joint]
        if not blocks:
            return None
        theta = self._parameters_of(ctx, link.child, belief.mean)
        arguments = self._arguments(ctx, link.function, belief.mean, self._known(ctx))
        found = link.function.parameter_slope(arguments[:, None], theta, 1)[:, 0]
        slope = found.new_zeros(*found.shape[:2], layout.n_scored)
        for each in blocks:
            slope[..., each.sensitivities] = found[..., each.columns]
        return slope

    def _noises(self, ctx: Context) -> list[Noise]:
        """Own noises, then those of the nodes below."""
        found = [ctx.message(link).noise for link in ctx.above_of(Weighs)]
        found += [ctx.error(link).noise for link in ctx.below_of(Predicts)]
        return [noise for noise in found if noise is not None]

    def _variances(self, ctx: Context) -> Tensor:
        return torch.cat([noise.variance for noise in self._noises(ctx)], 1)

    def _lengthscales(self, ctx: Context) -> Tensor:
        """Present lengthscales of all noises, (B, noises); 1 for white ones."""
        like, found = ctx.state.reference.lengthscale, []
        for block, noise in zip(ctx.bound.layout.noises, self._noises(ctx), strict=True):
            white = block.model.is_white
            found.append(torch.ones_like(like[:, 0]) if white else lengthscale_of(noise.kernel).expand(len(like)))
        return torch.stack(found, 1)

    def _scored_parameters(self, ctx: Context) -> Tensor:
        """All parameters with sensitivities, (B, p)."""
        found = [ctx.message(each.link).value for each in ctx.bound.layout.all_parameters if not each.is_joint]
        return torch.cat(found, -1) if found else torch.zeros_like(ctx.state.reference.parameters)

    def _transition_numbers(self, ctx: Context) -> Tensor:
        """The number of the last transition of the parameters of each link, (B, links)."""
        known = [ctx.message(each.link).transition for each in ctx.bound.layout.all_parameters]
        like = ctx.state.reference.transitions
        zero = like.new_zeros(len(like))
        found = [zero if transition is None else transition.number for transition in known]
        return torch.stack(found, 1) if found else like

    def forecast_state(self, ctx: Context, parameters: bool) -> KalmanState:
        state = ctx.state._replace(time=ctx.time)
        if parameters:
            return state
        certain = state.belief.covariance_by_source.clone()
        for block in ctx.bound.layout.all_parameters:
            certain[:, :, block.elements], certain[..., block.elements] = 0.0, 0.0
        return state._replace(belief=state.belief._replace(covariance_by_source=certain))

    def forecast_step(self, ctx: Context) -> KalmanState:
        return self.predict(ctx.at(ctx.state, Now(ctx.state.time + ctx.dt, ctx.dt, ctx.relative_dt)))

    def forecast_shown(self, ctx: Context, parameters: bool) -> ForecastStep:
        belief, here, below = ctx.state.belief, slice(self.dim), {}
        covariance = self.covariance(ctx) if parameters else belief.covariance[:, here, here]
        for link, sent in zip(ctx.below_of(Predicts), ctx.state.sent, strict=True):
            total = sent.distribution.covariance
            if parameters and ctx.bound.layout.n_scored:
                jacobian = self._jacobian(ctx, link, self._mapping(ctx, belief, link))
                direct = self._direct(ctx, belief, link)
                through = kalman.total_derivative(jacobian, belief.dmean_dtheta, direct)
                total = total + through @ self._scored_covariance(ctx) @ through.mT
            below[link.child.name] = sent.distribution.mean, total
        return ForecastStep(belief.mean[:, here], covariance, below)

    def draws(self, ctx: Context) -> bool:
        """Only if all parameters are part of the belief."""
        return not ctx.bound.layout.n_scored

    def stays_gaussian(self, ctx: Context) -> bool:
        return self.flow.is_affine and all(link.function.is_affine for link in ctx.below_of(Predicts))

    def point_size(self, ctx: Context) -> tuple[int, int]:
        """Each element needs one number, the state itself two."""
        return ctx.bound.layout.size, ctx.bound.layout.size + self.dim

    def points(self, ctx: Context, normal: Tensor, parameters: bool) -> Tensor:
        state = self.forecast_state(ctx, parameters)
        return state.belief.mean[:, None] + normal @ covariance_root(state.belief.covariance).mT

    def move_points(self, ctx: Context, points: Tensor, normal: Tensor) -> Tensor:
        """Diffusion is added in two halves, before and after the flow, and coloured noise acts by its mean."""
        layout, d, dt = ctx.bound.layout, self.dim, ctx.dt
        later, now = normal[..., :d], normal[..., d:]  # the first numbers are those of the second half
        white = self._white_noise(ctx).sum(1)[:, None].sqrt()
        moved = points.clone()
        drive = torch.zeros_like(points[..., :d])
        for block in layout.noises:
            if not block.model.is_white:
                moved[..., block.latents] = self._moved_noise(ctx, block, points, now)
        for block in layout.own.values():
            if not block.model.is_white:
                first = slice(block.latents.start, block.latents.start + d)
                later_share = 0.0 if self.integrator == "euler" else 0.5
                drive = drive + torch.lerp(points[..., first], moved[..., first], later_share)
        half = white * (0.5 * dt[:, None, None]).sqrt()
        if self.process_noise == "held":
            drive = drive + white * now[..., :d]
        else:
            moved[..., :d] += half * now[..., :d]
        inputs = self._present_inputs(ctx)
        path = input_path(layout.inputs, inputs, inputs, ctx.time - dt, dt)
        steps = POINT_STEPS * self.substeps
        h = dt / steps
        for _ in range(steps):
            jacobian = self._jacobian_at(ctx, moved, path) if self.integrator == "local_linearisation" else None
            moved[..., :d] = self._advanced(ctx, moved, h, path, self.integrator, jacobian, drive)
            path = path.after(h)
        if self.process_noise == "diffusion":
            moved[..., :d] += half * later
        for each in layout.all_parameters:
            walk = (dt[:, None] * ctx.message(each.link).walk).sqrt()
            moved[..., each.elements] += walk[:, None] * now[..., each.elements]
        for given in layout.inputs:
            if given.spec.variance is not None:
                moved[..., given.elements] = given.spec.variance.sqrt()[:, None] * now[..., given.elements]
        return moved

    def _moved_noise(self, ctx: Context, block: NoiseBlock, points: Tensor, normal: Tensor) -> Tensor:
        """The coordinates of a coloured noise one interval later, (B, k, coordinates · channels)."""
        transition = self._noise_model(ctx, block).transition(ctx.dt)
        sd = ctx.state.reference.variance[:, block.channels].sqrt()[:, None, None]
        shape = (*points.shape[:2], block.model.n_latents, -1)
        before, new = (each[..., block.latents].reshape(shape) for each in (points, normal))
        moved = transition.matrix[:, None] @ before + covariance_root(transition.covariance)[:, None] @ (sd * new)
        return moved.flatten(2)

    def _jacobian_at(self, ctx: Context, points: Tensor, path: InputPath) -> Tensor:
        """∂f/∂(x, u) at the mean of some points, (B, d, d + k), with the motion of inputs below it."""
        mean = points.mean(1)
        start = self._arguments(ctx, self.flow, mean, path.value)
        found = self.flow.linearise(start[:, None], self._parameters_of(ctx, None, mean), 1).jacobian
        size = start.shape[-1]
        return torch.constant_pad_nd(found.expand(len(mean), self.dim, size), (0, 0, 0, size - self.dim))

    def values_of(self, ctx: Context, points: Tensor) -> dict[str, Tensor]:
        found = {ctx.name: points[..., : self.dim]}
        known = torch.cat([self._present_inputs(ctx), ctx.time.to(points)[:, None]], 1)
        for link in ctx.below_of(Predicts):
            parameters = self._parameters_of(ctx, link.child, points)
            value = link.function(self._arguments(ctx, link.function, points, known), parameters)
            block = ctx.bound.layout.below[link]
            if not block.model.is_white:
                value = value + points[..., block.latents.start : block.latents.start + value.shape[-1]]
            found[link.child.name] = value
        return found

    def white_noise_below(self, ctx: Context) -> dict[str, Tensor]:
        blocks = {link.child.name: ctx.bound.layout.below[link] for link in ctx.below_of(Predicts)}
        return {name: self._observation_noise(ctx, block).sum(1) for name, block in blocks.items()}

    @property
    def holds_noise(self) -> bool:
        return self.process_noise == "held"

    def forecast_start(self, ctx: Context) -> ForecastStart:
        return ForecastStart(ctx.state.belief.mean[:, : self.dim], self.covariance(ctx))

    def smoothing_layout(self, bound: KalmanBound) -> SmoothingLayout:
        layout, blocks = bound.layout, {self.name: slice(self.dim)}
        blocks |= {each.link.parent.name: each.elements for each in layout.all_parameters if each.is_joint}
        return SmoothingLayout(layout.size, layout.n_scored, blocks)

    def smoothing_row(self, ctx: Context) -> Tensor:
        state = ctx.state
        beside = self._scored_covariance(ctx) if ctx.bound.layout.n_scored else None
        return pack(state.belief, state.time_update, beside)

    def smoothed(self, rows: Tensor, layout: SmoothingLayout, first_only: bool) -> tuple[Tensor, Tensor]:
        filtered, beside = unpack(rows, layout)
        mean, covariance = (smooth_first if first_only else smooth)(filtered)
        slope = mean[..., 1:]
        return mean[..., 0], covariance + slope @ beside @ slope.mT

    def energy(self, ctx: Context) -> Energy:
        """None of its own: the energies of the nodes below are predictive log-likelihoods."""
        return Energy()

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        shape, errors = ("order", "dimension"), ("error_order", "dimension")
        return {
            "mean": Recordable(shape, lambda ctx: ctx.state.belief.mean[:, None, : self.dim]),
            "sd": Recordable(shape, self.covariance, lambda found: standard_deviations(found)[..., None, :]),
            "covariance": Recordable(("element", "element_"), self.covariance),
            "error": Recordable(errors, lambda ctx: ctx.state.evidence.correction[:, None, : self.dim]),
            "weighted_error": Recordable(errors, lambda ctx: ctx.state.evidence.weighted_error[:, None]),
        }

    def covariance(self, ctx: Context) -> Tensor:
        """P of the state, plus what uncertain parameters beside the belief add to it; (B, dim, dim)."""
        belief, here = ctx.state.belief, slice(self.dim)
        total = belief.covariance_by_source[..., here, here].sum(1)
        if ctx.bound.layout.n_scored:
            slope = belief.dmean_dtheta[:, here]
            total = total + slope @ self._scored_covariance(ctx) @ slope.mT
        return total

    def _scored_covariance(self, ctx: Context) -> Tensor:
        """The covariance of all parameters with sensitivities, (B, p, p)."""
        found = torch.zeros_like(ctx.state.evidence.parameters.information)
        for each in ctx.bound.layout.all_parameters:
            if not each.is_joint:
                found[:, each.sensitivities, each.sensitivities] = ctx.message(each.link).covariance
        return found

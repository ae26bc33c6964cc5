"""Kalman states: hidden states whose belief is carried from one observation to the next."""

from collections.abc import Mapping
from dataclasses import KW_ONLY
from functools import partial
from typing import Any, ClassVar, NamedTuple, final

import torch
from pydantic import Field, SkipValidation
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.functions.linearisation import Linearisation
from pcnet.model.context import Neighbours, NodeContext, Now
from pcnet.model.links import AnyLink, Drives, Parametrises, Predicts, Weighs
from pcnet.model.messages import GaussianPrediction, ParameterTransition, PredictionError, ScoreError
from pcnet.model.node import BatchSpec, Energy, ErrorShape, Node, Recordable
from pcnet.model.protocols import ForecastsAlone, ForecastStart, ForecastStep
from pcnet.nodes.augmented_layout import AugmentedStateLayout, NoiseBlock, make_layout, repeat_per_channel
from pcnet.nodes.flow import FlowForecasts, check_state, checked_flow, first_value, parameters_of
from pcnet.nodes.precision import PrecisionNode, noise_score_error
from pcnet.numerics import kalman
from pcnet.numerics.branching import holds
from pcnet.numerics.coloured_noise import Noise, NoiseModel, NoiseSpec
from pcnet.numerics.estimators import Newton, NoiseScoring, ParameterEstimator
from pcnet.numerics.kalman import GaussianWithSensitivities, PredictiveDistribution, ScoreAndInformation
from pcnet.numerics.kernels import SquaredExponential
from pcnet.numerics.laplace import standard_deviations
from pcnet.numerics.trees import select, spans, tree_map
from pcnet.settings import PositiveVector, Vector, at_least_1d, check_size, number, settings

OVERFLOW = "covariance overflowed; pass NaN for outliers, or use on_divergence='hold'"


class Reference(NamedTuple):
    """The parameters and noises that the belief was computed with."""

    parameters: Tensor  # (B, p)
    variance: Tensor  # (B, all channels)
    lengthscale: Tensor  # (B, noises)
    transitions: Tensor  # number of the last transition of each parameter, (B, p)


class Evidence(NamedTuple):
    """What the last observation contributed."""

    parameters: ScoreAndInformation  # of the parameters, p
    noise: ScoreAndInformation  # of the own log-variances, o
    correction: Tensor  # change of the mean, (B, dim)
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
    phase: Tensor  # of each noise model, (B, noises)


class KalmanBound(NamedTuple):
    """Constants of a run; mean and variance of the first state are (B, dim)."""

    layout: AugmentedStateLayout
    initial_mean: Tensor
    initial_variance: Tensor


Context = NodeContext[KalmanState, KalmanBound]


def parameter_estimator() -> Newton:
    """The default for parameters of a Kalman state: recursive least squares with forgetting and covariance resets."""
    return Newton(decaying_forgetting=number(0.5), covariance_reset=True)


def noise_estimator(process: bool = False) -> NoiseScoring:
    """The default for noise levels around a Kalman state; process: those of process noise, with smaller steps."""
    if process:
        return NoiseScoring(
            step_limit_sd=number(1.5), decaying_forgetting=number(1.0), initial_noise_inflation=number(0.5)
        )
    return NoiseScoring(initial_noise_inflation=number(2.0))


@final
@settings
class KalmanStateNode(Node[KalmanState, KalmanBound], FlowForecasts, ForecastsAlone):
    """A hidden state (..., dim) that carries mean, covariance and sensitivities from one observation to the next.

    `predict` is the time update x ← x + dt f(x, θ), P ← FPFᵀ + Q. `update` is the measurement update with the errors of
    the nodes below, one node after the other. `retune` corrects the belief for parameters and noise levels that have
    changed. For linear flows and mappings and white noise this is the Kalman filter, otherwise the extended one. The
    scores that parameters and precisions receive include all sensitivities of the belief.

    White noise is held constant between observations (zero-order hold). Squared-exponential noise is a sum of Gaussian
    pulses, Matérn noise of smoothness ½ an Ornstein–Uhlenbeck process; both add latents to the state. Other kernels,
    and squared exponentials with n_pulses=0, are replaced by white noise of the same spectral density at zero
    frequency. Several precision nodes may weigh the state: its noise is the sum of theirs.

    Args:
        dim: Dimension.
        flow: Function of (state, parameters), or a `Function` with its own derivatives.
        initial_mean: First state, (..., dim); found from the first observation unless given.
        initial_sd: Standard deviation of the first state, one number or (..., dim).
        learn_noise: Whether precision nodes receive scores; False costs less.
        n_pulses: Pulses of a squared-exponential noise.
        second_order: Whether the mean includes the term ½ tr(∂²f/∂x² P); False is the usual extended Kalman filter.
        substeps: Integration steps between two observations.
    """

    _: KW_ONLY
    dim: int = Field(ge=1)
    flow: SkipValidation[Any]
    initial_mean: Vector | None = None
    initial_sd: PositiveVector = number(1.0)
    learn_noise: bool = True
    n_pulses: int = Field(default=5, ge=0)
    second_order: bool = True
    substeps: int = Field(default=1, ge=1)
    role: ClassVar[str] = "state"
    kind: ClassVar[str] = "state"
    parent_of: ClassVar[tuple[type[AnyLink], ...]] = (Predicts,)
    child_of: ClassVar[tuple[type[AnyLink], ...]] = (Parametrises, Weighs)
    sends_covariance: ClassVar[bool] = True
    multiple_noises: ClassVar[bool] = True
    required_actions: ClassVar[tuple[str, ...]] = ("predict", "update")

    def __post_init__(self) -> None:
        Node.__post_init__(self)
        object.__setattr__(self, "flow", checked_flow(self, self.flow, self.dim))
        if self.initial_mean is not None and at_least_1d(self.initial_mean).shape[-1] != self.dim:
            given = tuple(self.initial_mean.shape)
            raise SettingError(f"{self.title}: initial_mean has shape {given}; it must end in {self.dim}")
        check_size(self.title, "initial_sd", self.initial_sd, self.dim)
        if 0 < self.n_pulses < 3:
            raise SettingError(f"{self.title}: smooth noise needs n_pulses=3 or more; 0 replaces it by white noise")

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
        if isinstance(link, (Predicts, Drives)):
            raise GraphError(
                f"{self.title} cannot be the child in {link.parent.name!r} {link.key} {self.name!r}; use a "
                "GeneralisedStateNode, or make the input part of the state"
            )
        super().check_as_child(link)

    def check(self, links: Neighbours, like: Tensor) -> None:
        check_state(self, self.dim, self.flow, links, like)

    def default_estimator(self, link: AnyLink, above: tuple[AnyLink, ...]) -> ParameterEstimator | None:
        if isinstance(link, Parametrises):
            return parameter_estimator()
        return noise_estimator(process=isinstance(link, Weighs)) if self.learn_noise else None

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
        parameters: dict[Parametrises, int] = {}
        for of in (None, *(link.child for link in links.below)):
            parameters |= {link: link.parent.n_parameters for link in links.above_of(Parametrises, of)}
        layout = make_layout(self.dim, own, below, parameters, spec.zeros(), self.n_pulses, self.learn_noise)
        mean = spec.zeros(self.dim) if self.initial_mean is None else spec.expand(self.initial_mean, 1)
        return KalmanBound(layout, mean, spec.expand_vector(self.initial_sd, self.dim) ** 2)

    def _checked(self, noise: NoiseSpec | None, what: str) -> NoiseSpec:
        if noise is None:
            raise GraphError(f"the precision of {what} couples channels; use channels='each' or 'shared'")
        return noise

    def init(self, bound: KalmanBound, spec: BatchSpec) -> KalmanState:
        """A state of the right shapes that is not started: its reference variance is 0."""
        layout, zeros = bound.layout, spec.zeros
        n, p, s, o = layout.size, layout.n_parameters, layout.n_levels, layout.own_levels.stop
        mean = torch.constant_pad_nd(bound.initial_mean, (0, n - self.dim))
        parts = zeros(1 + s, n, n)
        parts[:, 0, : self.dim, : self.dim] = bound.initial_variance.diag_embed()
        belief = GaussianWithSensitivities(mean, parts, zeros(n, p), zeros(n, s))
        sent = []
        for block in layout.below.values():
            d = block.channels.stop - block.channels.start
            doubt = zeros(d, d) if p else zeros(0, 0)
            distribution = PredictiveDistribution(zeros(d), zeros(d, d), zeros(d, s), zeros(s, d, d), doubt)
            sent.append(GaussianPrediction(distribution, zeros(d, d)))
        noises = zeros(len(layout.noises))
        reference = Reference(zeros(p), zeros(layout.level_channels.shape[1]), noises, zeros(p))
        of_parameters, of_noise = (ScoreAndInformation(zeros(n), zeros(n, n)) for n in (p, o))
        evidence = Evidence(of_parameters, of_noise, zeros(self.dim), zeros(self.dim))
        return KalmanState(belief, reference, tuple(sent), evidence, zeros().double(), noises)

    def initialise(self, ctx: Context) -> KalmanState:
        """Find the first value from the first observation, unless it is given; its uncertainty is `initial_sd`."""
        ctx.propose(self._started(ctx))
        if self.initial_mean is not None:
            return ctx.state

        def errors(value: Tensor) -> dict[Predicts, PredictionError]:
            ctx.propose(self._start(ctx, value, certain=True))
            return {link: ctx.error(link) for link in ctx.below_of(Predicts)}

        value = ctx.state.belief.mean[:, : self.dim]
        ctx.propose(self._start(ctx, value, certain=True))
        mappings = {link: self._linearise(ctx, ctx.state.belief, link) for link in ctx.below_of(Predicts)}
        return self._start(ctx, first_value(value, mappings, errors))

    def _started(self, ctx: Context) -> KalmanState:
        """The state, with batch elements that have not started yet starting at their first value."""
        state = ctx.state
        fresh = ctx.cached("fresh", lambda: (state.reference.variance == 0).all(1), state.reference.variance)
        if not ctx.cached("any fresh", lambda: holds(fresh.any()), fresh):
            return state
        return select(fresh, self._start(ctx, state.belief.mean[:, : self.dim]), state)

    def _start(self, ctx: Context, value: Tensor, certain: bool = False) -> KalmanState:
        """The state with this value (B, dim) and nothing learned; certain: without uncertainty of the value."""
        layout, state = ctx.bound.layout, ctx.state
        variances = self._variances(ctx)
        parts = torch.zeros_like(state.belief.covariance_by_source)
        if not certain:
            parts[:, 0, : self.dim, : self.dim] = ctx.bound.initial_variance.diag_embed()
        for block in layout.noises:
            variance = layout.by_source(block, variances[:, block.channels]).repeat(1, 1, block.model.n_latents)
            parts[..., block.latents, block.latents].diagonal(dim1=-2, dim2=-1).copy_(variance)
        reference = Reference(self._parameters(ctx), variances, self._lengthscales(ctx), self._transitions(ctx).number)
        mean = torch.constant_pad_nd(value, (0, layout.size - self.dim))
        nothing = tree_map(torch.zeros_like, state)
        started = nothing._replace(
            belief=nothing.belief._replace(mean=mean, covariance_by_source=parts),
            reference=reference,
            time=ctx.time - ctx.dt,
        )
        none = [each.lagged_covariance for each in nothing.sent]
        return started._replace(sent=self._predictions(ctx, started, none))

    def prediction(self, ctx: Context, link: AnyLink) -> GaussianPrediction:
        assert isinstance(link, Predicts)
        sent = ctx.state.sent[ctx.below.index(link)]
        levels = ctx.bound.layout.below[link].levels

        def restricted() -> GaussianPrediction:
            return sent._replace(distribution=_with_levels(sent.distribution, levels))

        return ctx.cached(f"prediction of {link.child.name}", restricted, *sent.distribution, sent.lagged_covariance)

    def error(self, ctx: Context, link: AnyLink) -> ScoreError:
        evidence, layout = ctx.state.evidence, ctx.bound.layout
        if isinstance(link, Weighs):
            noise = ctx.message(link).noise
            assert noise is not None
            return noise_score_error(evidence.noise.part(layout.own[link].levels), noise.levels)
        assert isinstance(link, Parametrises)
        score, information = evidence.parameters.part(layout.parameters[link])
        return ScoreError(score, lambda: information)

    def predict(self, ctx: Context) -> KalmanState:
        """Time update of the belief, and the predictions of the nodes below."""
        ctx.propose(self._started(ctx))
        state, layout = ctx.state, ctx.bound.layout
        belief, p = state.belief, layout.n_parameters
        # the covariance with the previous predictions is carried like a sensitivity, for children with beliefs
        lagged = any(not link.child.observes for link in ctx.below)
        if lagged:
            towards = torch.bmm(belief.covariance, self._jacobians(ctx, belief).mT)
            belief = belief._replace(dmean_dtheta=torch.cat([belief.dmean_dtheta, towards], -1))
        dt = (ctx.time - state.time).to(belief.mean) / self.substeps
        phase = state.phase
        for _ in range(self.substeps):
            belief, phase = self._step(ctx, belief, phase, dt)
        carried = belief.dmean_dtheta[..., p:]
        belief = belief._replace(dmean_dtheta=belief.dmean_dtheta[..., :p])
        between = [torch.zeros_like(each.lagged_covariance) for each in state.sent]
        if lagged:
            joint = torch.bmm(self._jacobians(ctx, belief), carried).mT
            between = [joint[:, here, here] for here in spans(each.shape[-1] for each in between)]
        nothing = tree_map(torch.zeros_like, state.evidence)
        moved = state._replace(belief=belief, evidence=nothing, time=ctx.time, phase=phase)
        return moved._replace(sent=self._predictions(ctx, moved, between))

    def _step(
        self, ctx: Context, belief: GaussianWithSensitivities, phase: Tensor, dt: Tensor
    ) -> tuple[GaussianWithSensitivities, Tensor]:
        """One Euler step of state and noises."""
        layout, reference = ctx.bound.layout, ctx.state.reference
        d, h = self.dim, dt[:, None, None]
        theta = parameters_of(ctx, None, belief.mean)
        velocity, state_jacobian = self._velocity(belief, theta)
        jacobian = state_jacobian.new_zeros(len(dt), d, layout.size)
        jacobian[..., :d] = state_jacobian
        noise = jacobian.new_zeros(len(dt), 1 + layout.n_levels, d)
        for block in layout.own.values():
            model, at = self._noise_model(ctx, block), phase[:, block.place]
            jacobian[..., block.latents] = repeat_per_channel(model.loadings(at), d)
            loaded = torch.bmm(jacobian[..., block.latents], belief.mean[:, block.latents, None])
            velocity = velocity + loaded[..., 0]
            white = (model.white_variance(dt) * dt**2)[:, None] * reference.variance[:, block.channels]
            noise = noise + layout.by_source(block, white)
        dtheta = belief.dmean_dtheta.new_zeros(len(dt), d, belief.dmean_dtheta.shape[-1])
        if ctx.above_of(Parametrises):
            slope = self.flow.parameter_slope(belief.mean[:, None, :d], theta, 1)[:, 0]
            dtheta[..., : theta.shape[-1]] = h * slope
        belief = kalman.predict(belief, dt[:, None] * velocity, h * jacobian, dtheta, noise)
        phases = []
        for block in layout.noises:
            variance = layout.by_source(block, reference.variance[:, block.channels])
            model = self._noise_model(ctx, block)
            belief, at = model.predict(belief, block.latents, variance, phase[:, block.place], dt)
            phases.append(at)
        return belief, torch.stack(phases, 1)

    def _velocity(self, belief: GaussianWithSensitivities, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Expected velocity f(x, θ) + ½ tr(∂²f/∂x² P), (B, dim), and the Jacobian of f (B, dim, dim)."""
        d = self.dim
        x = belief.mean[:, None, :d]
        if self.second_order:
            # derivatives of J along all unit vectors, passed as orders of motion, are all second derivatives
            x = torch.cat([x, torch.eye(d, dtype=x.dtype, device=x.device).expand(len(x), d, d)], 1)
        flow = self.flow.linearise(x, theta, x.shape[1])
        if not self.second_order or flow.jacobian_derivative is None:
            return flow.value[:, 0], flow.jacobian
        covariance = belief.covariance[:, :d, :d]
        return flow.value[:, 0] + 0.5 * (flow.jacobian_derivative * covariance[:, :, None]).sum((1, 3)), flow.jacobian

    def update(self, ctx: Context) -> KalmanState:
        """Measurement update with the errors of the nodes below, one node after the other."""
        layout = ctx.bound.layout
        for i, link in enumerate(ctx.below_of(Predicts)):
            if i:  # predict again, after the updates so far
                sent = list(ctx.state.sent)
                sent[i] = self._predict_child(ctx, ctx.state, link, sent[i].lagged_covariance)
                ctx.propose(ctx.state._replace(sent=tuple(sent)))
            state, block = ctx.state, layout.below[link]
            belief, evidence = state.belief, state.evidence
            error = ctx.error(link).eliminated
            weighted, precision = error.weighted[:, 0], error.precision.dense()
            mapping = self._linearise(ctx, belief, link)
            jacobian, direct = self._jacobian(ctx, link, mapping), self._direct(ctx, belief, link)
            known = error.noise is not None and error.noise.levels
            noise = self._observation_noise(ctx, block) if known else None
            if layout.n_parameters:
                score = kalman.parameter_score(jacobian, belief.dmean_dtheta, direct, weighted, precision)
                evidence = evidence._replace(parameters=evidence.parameters.plus(score))
            if layout.own_levels.stop:
                distribution = _with_levels(state.sent[i].distribution, layout.own_levels)
                raw = torch.bmm(distribution.covariance, weighted[..., None])[..., 0]
                score = kalman.noise_score(distribution, raw, precision)
                evidence = evidence._replace(noise=evidence.noise.plus(score))
            updated = kalman.update(belief, jacobian, direct, weighted, precision, noise)
            evidence = evidence._replace(
                correction=evidence.correction + (updated.mean - belief.mean)[:, : self.dim],
                weighted_error=evidence.weighted_error + torch.bmm(weighted[:, None], jacobian[..., : self.dim])[:, 0],
            )
            ctx.propose(state._replace(belief=updated, evidence=evidence))
        belief = ctx.state.belief  # whose covariance may overflow, although its parts are finite
        size = belief.covariance_by_source.abs().sum()
        size = size + belief.dmean_dtheta.square().sum() + belief.dmean_dlogvar.square().sum()
        if not holds(torch.isfinite(size)):
            ctx.mark_diverged(~torch.isfinite(self.covariance(ctx)).flatten(1).all(1), OVERFLOW)
        return ctx.state

    def retune(self, ctx: Context) -> KalmanState:
        """Correct the belief for parameters and noise levels that have changed, by its sensitivities."""
        ctx.propose(self._started(ctx))
        layout, state, reference = ctx.bound.layout, ctx.state, ctx.state.reference
        mean, parts, dtheta, dlogvar = state.belief
        theta, variance = self._parameters(ctx), self._variances(ctx)
        transitions = reference.transitions
        if layout.n_parameters:
            number, reached, gain, residual = self._transitions(ctx)
            changed = number != transitions
            # parameters with a new transition: their value before it; the others: their present value
            target = torch.where(changed, reached, theta)
            mean = mean + torch.bmm(dtheta, (target - reference.parameters)[..., None])[..., 0]
            new = changed[:, None]
            residual = torch.where(new & new.mT, residual, 0.0)
            parts = torch.cat([parts[:, :1] + (dtheta @ residual @ dtheta.mT)[:, None], parts[:, 1:]], 1)
            dtheta = torch.where(new, dtheta @ gain, dtheta)
            transitions = number
        if layout.n_levels:
            ratio = (variance / reference.variance).log()  # the same for all channels of a level
            ratio = torch.where(variance > 0, ratio, 0.0)  # a likelihood of its own has no variance
            change = ratio @ layout.level_channels.mT / layout.level_channels.sum(1)
            mean = mean + torch.bmm(dlogvar, change[..., None])[..., 0]
            parts = torch.cat([parts[:, :1], parts[:, 1:] * change.exp()[..., None, None]], 1)
        reference = Reference(theta, variance, self._lengthscales(ctx), transitions)
        return state._replace(belief=GaussianWithSensitivities(mean, parts, dtheta, dlogvar), reference=reference)

    def _predictions(self, ctx: Context, state: KalmanState, lagged: list[Tensor]) -> tuple[GaussianPrediction, ...]:
        pairs = zip(ctx.below_of(Predicts), lagged, strict=True)
        return tuple(self._predict_child(ctx, state, link, each) for link, each in pairs)

    def _predict_child(self, ctx: Context, state: KalmanState, link: Predicts, lagged: Tensor) -> GaussianPrediction:
        """The predictive distribution of a node below, from this state."""
        layout, belief, at = ctx.bound.layout, state.belief, ctx.at(state, ctx.now)
        block = layout.below[link]
        mapping = self._linearise(at, belief, link)
        jacobian = self._jacobian(at, link, mapping)
        latents = belief.mean[:, block.latents, None]
        mean = mapping.value[:, 0] + torch.bmm(jacobian[..., block.latents], latents)[..., 0]
        d = mean.shape[1]
        doubt = mean.new_zeros(len(mean), d, d) if layout.n_parameters else mean.new_zeros(len(mean), 0, 0)
        if layout.n_parameters and layout.n_levels:
            through = kalman.total_derivative(jacobian, belief.dmean_dtheta, self._direct(at, belief, link))
            doubt = through @ self._parameter_covariance(at, online=True) @ through.mT
        noise = self._observation_noise(at, block)
        return GaussianPrediction(kalman.predict_observation(belief, mean, jacobian, noise, doubt), lagged)

    def _noise_model(self, ctx: Context, block: NoiseBlock) -> NoiseModel:
        lengthscale = ctx.state.reference.lengthscale[:, block.place]
        return block.model.with_lengthscale(lengthscale) if block.learned_lengthscale else block.model

    def _observation_noise(self, ctx: Context, block: NoiseBlock) -> Tensor:
        """Variance of the white part of an observation noise, by source; (B, 1 + s, d).

        The variance that the latents miss has no source, so that the approximation is not mistaken for less noise.
        """
        model, variance = self._noise_model(ctx, block), ctx.state.reference.variance[:, block.channels]
        noise = ctx.bound.layout.by_source(block, model.white_variance(ctx.dt)[:, None] * variance)
        noise[:, 0] += model.unexplained_variance(ctx.dt)[:, None] * variance
        return noise

    def _linearise(self, ctx: Context, belief: GaussianWithSensitivities, link: Predicts) -> Linearisation:
        mean, theta = belief.mean, parameters_of(ctx, link.child, belief.mean)
        compute = partial(link.function.linearise, mean[:, None, : self.dim], theta, 1)
        return ctx.cached(f"mapping to {link.child.name}", compute, mean, theta)

    def _jacobian(self, ctx: Context, link: Predicts, mapping: Linearisation) -> Tensor:
        """∂g/∂s of a node below, with the latents of its noise; (B, d, n)."""
        layout, d = ctx.bound.layout, mapping.jacobian.shape[1]
        block = layout.below[link]
        jacobian = mapping.jacobian.new_zeros(len(ctx.state.belief.mean), d, layout.size)
        jacobian[..., : self.dim] = mapping.jacobian
        model = self._noise_model(ctx, block)
        scale = (1 - model.unexplained_variance(ctx.dt)).sqrt()[:, None]
        loadings = scale * model.loadings(ctx.state.phase[:, block.place])
        jacobian[..., block.latents] = repeat_per_channel(loadings, d)
        return jacobian

    def _jacobians(self, ctx: Context, belief: GaussianWithSensitivities) -> Tensor:
        """∂g/∂s of all nodes below, without observation noise; (B, all d, n)."""
        size, batch = ctx.bound.layout.size, len(belief.mean)
        found = [self._linearise(ctx, belief, link).jacobian for link in ctx.below_of(Predicts)]
        padded = [torch.constant_pad_nd(each, (0, size - self.dim)) for each in found]
        return torch.cat([each.expand(batch, -1, -1) for each in padded], 1)

    def _direct(self, ctx: Context, belief: GaussianWithSensitivities, link: Predicts) -> Tensor | None:
        """∂g/∂θ of a mapping at a fixed state, (B, d, p), if it has parameters."""
        links, layout = ctx.above_of(Parametrises, link.child), ctx.bound.layout
        if not links:
            return None
        theta, first = parameters_of(ctx, link.child, belief.mean), layout.parameters[links[0]].start
        found = link.function.parameter_slope(belief.mean[:, None, : self.dim], theta, 1)[:, 0]
        return torch.constant_pad_nd(found, (first, layout.n_parameters - first - found.shape[-1]))

    def _noises(self, ctx: Context) -> list[Noise]:
        """Own noises, then those of the nodes below."""
        found = [ctx.message(link).noise for link in ctx.above_of(Weighs)]
        found += [ctx.error(link).noise for link in ctx.below_of(Predicts)]
        return [noise for noise in found if noise is not None]

    def _variances(self, ctx: Context) -> Tensor:
        return torch.cat([noise.variance for noise in self._noises(ctx)], 1)

    def _lengthscales(self, ctx: Context) -> Tensor:
        """Present time scales of all noises, (B, noises)."""
        pairs = zip(ctx.bound.layout.noises, self._noises(ctx), strict=True)
        found = [block.model.lengthscale_of(noise.kernel) for block, noise in pairs]
        return torch.stack([each.expand(len(ctx.state.phase)) for each in found], 1)

    def _parameters(self, ctx: Context) -> Tensor:
        """θ of the flow and of all mappings, (B, p)."""
        links = ctx.bound.layout.parameters
        mean = ctx.state.belief.mean
        return torch.cat([ctx.message(link).value for link in links], -1) if links else mean.new_zeros(len(mean), 0)

    def _transitions(self, ctx: Context) -> ParameterTransition:
        """The last transitions of all parameters together."""
        reached = self._parameters(ctx).clone()
        p = reached.shape[1]
        number = torch.zeros_like(reached)
        gain = torch.eye(p, dtype=reached.dtype, device=reached.device).repeat(len(reached), 1, 1)
        residual = torch.zeros_like(gain)
        for link, part in ctx.bound.layout.parameters.items():
            transition = ctx.message(link).transition
            if transition is not None:
                number[:, part], reached[:, part] = transition.number[:, None], transition.mean
                gain[:, part, part], residual[:, part, part] = transition.gain, transition.residual_covariance
        return ParameterTransition(number, reached, gain, residual)

    def _parameter_covariance(self, ctx: Context, online: bool = False) -> Tensor:
        """The covariance of all parameters, (B, p, p); online: only of those that are learned online."""
        found = torch.zeros_like(ctx.state.evidence.parameters.information)
        for link, part in ctx.bound.layout.parameters.items():
            message = ctx.message(link)
            if not (online and message.transition is None):
                found[:, part, part] = message.covariance
        return found

    def forecast(self, ctx: Context, step: Tensor, every: int, count: int, parameters: bool) -> list[ForecastStep]:
        found, state, here = [], ctx.state, slice(self.dim)
        relative = step / (ctx.dt if ctx.relative_dt is None else ctx.dt / ctx.relative_dt)
        for i in range(count * every):
            at = ctx.at(state._replace(time=ctx.time - step), Now(ctx.time, step, relative))
            state = self.predict(at)
            if (i + 1) % every:
                continue
            at, belief = ctx.at(state, at.now), state.belief
            covariance = self.covariance(at) if parameters else belief.covariance[:, here, here]
            doubt = self._parameter_covariance(at) * parameters
            below = {}
            for link, sent in zip(ctx.below_of(Predicts), state.sent, strict=True):
                jacobian = self._jacobian(at, link, self._linearise(at, belief, link))
                through = kalman.total_derivative(jacobian, belief.dmean_dtheta, self._direct(at, belief, link))
                total = sent.distribution.covariance + through @ doubt @ through.mT
                below[link.child.name] = sent.distribution.mean, total
            found.append(ForecastStep(belief.mean[:, here], covariance, below))
        return found

    def forecast_start(self, ctx: Context) -> ForecastStart:
        return ForecastStart(ctx.state.belief.mean[:, : self.dim], self.covariance(ctx))

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
            "error": Recordable(errors, lambda ctx: ctx.state.evidence.correction[:, None]),
            "weighted_error": Recordable(errors, lambda ctx: ctx.state.evidence.weighted_error[:, None]),
        }

    def covariance(self, ctx: Context) -> Tensor:
        """P of the state, plus what uncertain parameters and noise levels add to it; (B, dim, dim)."""
        layout, belief = ctx.bound.layout, ctx.state.belief
        here = slice(self.dim)
        total = belief.covariance[:, here, here]
        for link, part in layout.parameters.items():
            slope = belief.dmean_dtheta[:, here, part]
            total = total + slope @ ctx.message(link).covariance @ slope.mT
        for weighs, block in layout.own.items():
            uncertain = ctx.message(weighs).covariance
            if block.levels.stop > block.levels.start and uncertain is not None:
                slope = belief.dmean_dlogvar[:, here, block.levels]
                total = total + slope @ uncertain @ slope.mT
        return total


def _with_levels(distribution: PredictiveDistribution, levels: slice) -> PredictiveDistribution:
    """A predictive distribution with its derivatives with respect to some log-variances only."""
    slope, parts = distribution.dmean_dlogvar[..., levels], distribution.covariance_by_source[:, levels]
    return distribution._replace(dmean_dlogvar=slope, covariance_by_source=parts)

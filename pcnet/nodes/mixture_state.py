"""States with several beliefs: a mixture whose moments are sent to the nodes below."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pcnet.errors import GraphError
from pcnet.model.context import Neighbours, NodeContext, Now
from pcnet.model.links import AnyLink, Drives, Parametrises, Predicts, Weighs
from pcnet.model.messages import BlockPosterior, GaussianPrediction, ScoreError
from pcnet.model.node import BatchSpec, Energy, Recordable
from pcnet.model.protocols import ForecastContext, ForecastStart, ForecastStep, SmoothingLayout, SmoothsBack
from pcnet.nodes.kalman_belief import KalmanBound, KalmanState
from pcnet.nodes.kalman_inputs import no_error
from pcnet.nodes.kalman_measurement import take_in
from pcnet.nodes.kalman_parameters import scored_covariance, state_covariance
from pcnet.nodes.kalman_predictions import predict_child
from pcnet.nodes.kalman_smoothing import belief_of, last_beside
from pcnet.nodes.kalman_start import first_belief, start, started
from pcnet.nodes.kalman_state import OVERFLOW, KalmanStateNode
from pcnet.nodes.mixture_smoothing import (
    PartsBefore,
    TimeUpdates,
    no_parts_before,
    pack,
    pack_belief,
    unpack,
    unpack_belief,
)
from pcnet.nodes.modes import (
    average,
    chosen_by,
    context_of_modes,
    errors_of_modes,
    inwards,
    moments,
    number_of,
    outwards,
    repeated,
    spec_of_modes,
    spec_of_noise,
    spread,
)
from pcnet.nodes.precision import noise_score_error
from pcnet.numerics.branching import holds
from pcnet.numerics.kalman import PredictiveDistribution, ScoreAndInformation
from pcnet.numerics.laplace import standard_deviations
from pcnet.numerics.mixture_smoothing import Conditioned, Pairs, SmoothedMixture, smooth_mixture, step_back
from pcnet.numerics.mixtures import Peaks
from pcnet.numerics.sigma_points import covariance_root
from pcnet.numerics.trees import tree_map
from pcnet.settings import settings

Context = NodeContext[Any, Any]


class MixtureState(NamedTuple):
    """Several beliefs about the state, and their probabilities, which may be known by stages."""

    modes: KalmanState  # (B, k, ...)
    probability: Tensor  # of each stage of each mode, (B, k, s)
    sent: tuple[GaussianPrediction, ...]  # moments of what all modes predict of each node below
    predicted_probability: Tensor  # before the last observation, (B, k, s)
    gain: Tensor  # log-evidence of the mixture minus that of its moments, of the last observation, (B,)
    before: PartsBefore  # what the last time update started from, for a smoother


class MixtureBound(NamedTuple):
    """Constants of a run."""

    modes: KalmanBound  # of k·B elements, mode by mode
    k: int
    stages: int


@settings
class MixtureStateNode(KalmanStateNode, SmoothsBack):
    """A hidden state with k beliefs, its modes, each of which is that of a `KalmanStateNode`.

    In `update` modes are weighed by their predictive likelihoods. Nodes below receive the moments of the mixture. The
    energy of the node is what the evidence of the mixture is more than that of its moments.
    """

    joins_causes: ClassVar[bool] = False
    keeps_low_rank: ClassVar[bool] = False

    @abstractmethod
    def counts(self, links: Neighbours) -> tuple[int, int]:
        """The number k of modes, and the number s of stages of each."""

    @abstractmethod
    def first_probability(self, ctx: Context) -> Tensor:
        """Probabilities (B, k, s) of modes, or of stages of modes, before the first observation."""

    @property
    @abstractmethod
    def alternative(self) -> str:
        """What to do instead below a node that this one cannot predict."""

    def check_as_parent(self, link: AnyLink) -> None:
        super().check_as_parent(link)
        if not link.child.observes:
            raise GraphError(
                f"{self.title} predicts observations only; for {link.child.name!r} use a KalmanStateNode"
                f"{self.alternative}"
            )

    def bind(self, links: Neighbours, spec: BatchSpec) -> Any:
        k, stages = self.counts(links)
        noise = {of: spec_of_noise(each, spec.batch, k) for of, each in links.noise.items()}
        modes = super().bind(links._replace(noise=noise), spec_of_modes(spec, k))
        return MixtureBound(modes, k, stages)

    def init(self, bound: Any, spec: BatchSpec) -> Any:
        k = bound.k
        modes = outwards(super().init(bound.modes, spec_of_modes(spec, k)), k)
        weight = spec.zeros(k, bound.stages) + 1 / (k * bound.stages)
        sent = moments(inwards(modes).sent, weight.sum(-1), k)
        layout = bound.modes.layout
        before = no_parts_before(spec, k, bound.stages, layout.size if bound.modes.smooth else 0, layout.n_scored)
        return MixtureState(modes, weight, sent, weight, spec.zeros(), before)

    def _inner(self, ctx: Context, modes: KalmanState | None = None) -> Context:
        """The context of all modes at once."""
        modes = ctx.state.modes if modes is None else modes
        return context_of_modes(ctx, inwards(modes), ctx.bound.modes, ctx.bound.k)

    def _outer(self, ctx: Context, state: KalmanState, probability: Tensor | None = None) -> MixtureState:
        """The state with these modes, of k·B elements."""
        k = ctx.bound.k
        probability = ctx.state.probability if probability is None else probability
        sent = moments(state.sent, probability.sum(-1), k)
        return MixtureState(outwards(state, k), probability, sent, probability, ctx.state.gain, ctx.state.before)

    def _any(self, ctx: Context) -> Context:
        """The context of the first mode."""
        return ctx.at(tree_map(lambda value: value[:, 0], ctx.state.modes), ctx.now, bound=ctx.bound.modes)

    def _started(self, ctx: Context) -> Any:
        inner = self._inner(ctx)
        begun = started(inner)
        if begun is inner.state:
            return ctx.state
        fresh = (inner.state.reference.variance == 0).all(1)[: len(ctx.state.gain)]
        probability = torch.where(fresh[:, None, None], self.first_probability(ctx), ctx.state.probability)
        return self._outer(ctx, begun, probability)

    def _first_belief(self, ctx: Context) -> tuple[Tensor, Tensor]:
        inner = self._inner(ctx)
        value, covariance = (each[: len(ctx.state.gain)] for each in first_belief(inner, inner.state))
        return value, covariance

    def _start_with(self, ctx: Context, value: Tensor, covariance: Tensor | None) -> Any:
        k = ctx.bound.k
        spread = None if covariance is None else repeated(covariance, k)
        return self._outer(ctx, start(self._inner(ctx), repeated(value, k), spread))

    def prediction(self, ctx: Context, link: AnyLink) -> Any:
        assert isinstance(link, Predicts)
        sent = ctx.state.sent[ctx.below.index(link)]
        levels = ctx.bound.modes.layout.below[link].levels

        def restricted() -> GaussianPrediction:
            return GaussianPrediction(sent.distribution.of_levels(levels), sent.lagged_covariance)

        keys = (*sent.distribution, sent.lagged_covariance)
        return ctx.cached(f"prediction of {link.child.name}", restricted, *keys)

    def update(self, ctx: Context) -> Any:
        """Measurement update of each mode, and of the probabilities of the categories."""
        evidence = tree_map(torch.zeros_like, ctx.state.modes.evidence)
        nothing = ctx.state._replace(modes=ctx.state.modes._replace(evidence=evidence))
        ctx.propose(nothing._replace(gain=torch.zeros_like(nothing.gain)))
        k = ctx.bound.k
        for i, link in enumerate(ctx.below_of(Predicts)):
            inner = self._inner(ctx)
            if i:  # predict again, after the updates so far
                sent, whole = list(inner.state.sent), list(ctx.state.sent)
                sent[i] = predict_child(inner, inner.state, link, sent[i].lagged_covariance)
                (whole[i],) = moments((sent[i],), self._weight(ctx), k)
                modes = outwards(inner.state._replace(sent=tuple(sent)), k)
                ctx.propose(ctx.state._replace(modes=modes, sent=tuple(whole)))
                inner = self._inner(ctx)
            of_modes, of_all = inner.state.sent[i].distribution, ctx.state.sent[i].distribution
            assert isinstance(of_modes, PredictiveDistribution) and isinstance(of_all, PredictiveDistribution)
            found = errors_of_modes(ctx.error(link), of_all, of_modes, k)
            updated = take_in(inner, link, of_modes, found.error)
            log_weight = ctx.state.probability.log() + found.log_likelihood[..., None]
            total = log_weight.flatten(1).logsumexp(1)
            probability = (log_weight - total[:, None, None]).exp()
            gain = ctx.state.gain + total - found.of_moments
            # the predictions stay those that the errors are about
            ctx.propose(ctx.state._replace(modes=outwards(updated, k), probability=probability, gain=gain))
        diverged = ~torch.isfinite(self._covariance(ctx)).flatten(1).all(1)
        if holds(diverged.any()):
            ctx.mark_diverged(diverged, OVERFLOW)
        return ctx.state

    def retune(self, ctx: Context) -> Any:
        ctx.propose(self._started(ctx))
        retuned = super().retune(self._inner(ctx))
        return ctx.state._replace(modes=outwards(retuned, ctx.bound.k))

    def error(self, ctx: Context, link: AnyLink) -> Any:
        state, layout, weight = ctx.state, ctx.bound.modes.layout, self._weight(ctx)
        evidence, belief = state.modes.evidence, state.modes.belief

        def score(of: ScoreAndInformation) -> ScoreAndInformation:
            return ScoreAndInformation(*(average(each, weight) for each in of))

        if isinstance(link, Drives):
            return no_error(ctx, link)
        if isinstance(link, Weighs):
            noise = ctx.message(link).noise
            assert noise is not None
            return noise_score_error(score(evidence.noise).part(layout.own[link].levels), noise.levels)
        assert isinstance(link, Parametrises)
        (block,) = (each for each in layout.all_parameters if each.link is link)
        if not block.is_joint:
            found, information = score(evidence.parameters).part(block.sensitivities)
            return ScoreError(found, lambda: information)
        place, mean = block.elements, belief.mean[..., block.elements]

        def covariance() -> Tensor:
            inside = belief.covariance_by_source[..., place, place].sum(2)
            return average(inside, weight) + spread(mean, weight)

        return BlockPosterior(average(mean, weight), average(evidence.correction[..., place], weight), covariance)

    def _weight(self, ctx: Context) -> Tensor:
        """Probability of each category, (B, k)."""
        return ctx.state.probability.sum(-1)  # type: ignore[no-any-return]

    def _mean(self, ctx: Context) -> Tensor:
        return average(ctx.state.modes.belief.mean[..., : self.dim], self._weight(ctx))

    def _covariance(self, ctx: Context) -> Tensor:
        """Covariance of the mixture, (B, dim, dim)."""
        weight, mean = self._weight(ctx), ctx.state.modes.belief.mean[..., : self.dim]
        inside = outwards(state_covariance(self._inner(ctx)), ctx.bound.k)
        return average(inside, weight) + spread(mean, weight)

    def energy(self, ctx: Context) -> Energy:
        """Evidence that the mixture has more than its moments, which the nodes below count."""
        return Energy(accuracy=ctx.state.gain)

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        shape, errors = ("order", "dimension"), ("error_order", "dimension")

        def evidence(name: str) -> Recordable:
            def read(ctx: Context) -> Tensor:
                value: Tensor = getattr(ctx.state.modes.evidence, name)[..., : self.dim]
                return average(value, self._weight(ctx))[:, None]

            return Recordable(errors, read)

        return {
            "mean": Recordable(shape, lambda ctx: self._mean(ctx)[:, None]),
            "sd": Recordable(shape, self._covariance, lambda found: standard_deviations(found)[..., None, :]),
            "covariance": Recordable(("element", "element_"), self._covariance),
            "error": evidence("correction"),
            "weighted_error": evidence("weighted_error"),
        }

    def forecast_state(self, ctx: Context, parameters: bool) -> Any:
        state = super().forecast_state(self._inner(ctx), parameters)
        return ctx.state._replace(modes=outwards(state, ctx.bound.k))

    def forecast_step(self, ctx: Context) -> Any:
        time = ctx.state.modes.time[:, 0]
        return self.predict(ctx.at(ctx.state, Now(time + ctx.dt, ctx.dt, ctx.relative_dt)))

    def forecast_shown(self, ctx: Context, parameters: bool) -> ForecastStep:
        names = [link.child.name for link in ctx.below_of(Predicts)]
        sent = (each.distribution for each in ctx.state.sent)
        below = {name: (each.mean, each.variance) for name, each in zip(names, sent, strict=True)}
        return ForecastStep(self._mean(ctx), self._covariance(ctx), below)

    def forecast_start(self, ctx: Context) -> ForecastStart:
        return ForecastStart(self._mean(ctx), self._covariance(ctx))

    # --- draws: a mode and stage by its probability, then a point of its belief, with the number of the stage behind it
    def draws(self, ctx: Context) -> bool:
        return super().draws(self._any(ctx))

    def velocity(self, ctx: Context, now: ForecastContext) -> Tensor:
        raise GraphError(f"futures of {self.title} can be drawn only if its parameters have no estimator of their own")

    def stays_gaussian(self, ctx: Context) -> bool:
        return super().stays_gaussian(self._any(ctx))

    def point_size(self, ctx: Context) -> tuple[int, int]:
        n, m = super().point_size(self._any(ctx))
        return n + 1, m

    def points(self, ctx: Context, normal: Tensor, parameters: bool) -> Tensor:
        k = ctx.bound.k
        belief = KalmanStateNode.forecast_state(self, self._inner(ctx), parameters).belief
        mean, root = outwards(belief.mean, k), outwards(covariance_root(belief.covariance), k)
        chosen = chosen_by(ctx.state.probability.flatten(1)[:, None], normal[..., -1:])
        moved = mean[:, None] + torch.einsum("bcn,bkmn->bckm", normal[..., :-1], root)
        picked = (chosen.view(*chosen.shape[:2], k, -1).sum(-1)[..., None] * moved).sum(2)
        return torch.cat([picked, number_of(chosen)], -1)

    def move_points(self, ctx: Context, points: Tensor, normal: Tensor) -> Tensor:
        return super().move_points(self._any(ctx), points, normal)

    def values_of(self, ctx: Context, points: Tensor) -> dict[str, Tensor]:
        return super().values_of(self._any(ctx), points)

    def white_noise_below(self, ctx: Context) -> dict[str, Tensor]:
        return super().white_noise_below(self._any(ctx))

    def warnings(self, ctx: Context, elements: int) -> Iterator[str]:
        return super().warnings(self._inner(ctx), elements)

    def has_scales(self, bound: Any) -> bool:
        return False

    def start_peaks(self, ctx: Context) -> Peaks | None:
        return None

    def can_bend(self, bound: Any) -> bool:
        return False

    def smoothing_layout(self, bound: Any) -> SmoothingLayout:
        layout, c = super().smoothing_layout(bound.modes), bound.k * bound.stages
        belief = slice(2, 2 + c + bound.k * sum(belief_of(layout)))
        return layout._replace(by_steps=False, modes=bound.k, stages=bound.stages, belief=belief)

    def smoothing_row(self, ctx: Context) -> Tensor:
        state = ctx.state
        beside = scored_covariance(self._any(ctx)) if ctx.bound.modes.layout.n_scored else None
        return pack(state.modes, state.probability, state.before, beside)

    @abstractmethod
    def pairs(self, updates: TimeUpdates) -> Pairs:
        """How parts of the belief before time updates are predicted."""

    @abstractmethod
    def condition(self, after: SmoothedMixture, pairs: Pairs, joint: Tensor) -> Conditioned:
        """What the smoothed belief after a time update tells of the parts before it; see `mixture_smoothing`."""

    def _moments(self, found: SmoothedMixture, beside: Tensor) -> tuple[Tensor, Tensor]:
        """Means (..., n) and covariances (..., n, n) of smoothed beliefs."""
        mean, covariance = found.moments()
        slope = mean[..., 1:]
        return mean[..., 0], covariance + slope @ beside @ slope.mT

    def smoothed(self, rows: Tensor, layout: SmoothingLayout, first_only: bool) -> tuple[Tensor, Tensor]:
        kept, beside = unpack(rows, layout, self.pairs)
        return self._moments(smooth_mixture(kept, self.condition, first_only), beside)

    def smooth_back(self, belief: Tensor, later: Tensor, earlier: Tensor, layout: SmoothingLayout) -> Tensor:
        kept, _ = unpack(torch.stack([earlier, later]), layout, self.pairs)
        return pack_belief(step_back(kept, self.condition, 1, unpack_belief(belief, layout)))

    def smoothed_moments(self, belief: Tensor, last: Tensor, layout: SmoothingLayout) -> tuple[Tensor, Tensor]:
        return self._moments(unpack_belief(belief, layout), last_beside(last, layout))

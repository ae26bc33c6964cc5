"""The belief of a Kalman state, and the constants of a run that it is computed with."""

from typing import Literal, NamedTuple

from torch import Tensor

from pcnet.functions.base import Function
from pcnet.model.context import NodeContext
from pcnet.model.messages import GaussianPrediction
from pcnet.nodes.augmented_layout import AugmentedStateLayout
from pcnet.nodes.kalman_cluster import Cluster
from pcnet.nodes.kalman_smoothing import TimeUpdate
from pcnet.numerics.kalman import GaussianWithSensitivities, ScoreAndInformation
from pcnet.numerics.transitions import IntegratorName

Linearisation = Literal["unscented", "cubature", "second_order", "taylor"]


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


class Motion(NamedTuple):
    """How a state moves from one observation to the next: settings of `KalmanStateNode`."""

    dim: int
    flow: Function
    integrator: IntegratorName
    substeps: int
    linearisation: Linearisation
    process_noise: Literal["diffusion", "held"]


class KalmanBound(NamedTuple):
    """Constants of a run; mean and variance of the first state are (B, dim)."""

    motion: Motion
    cluster: Cluster
    layout: AugmentedStateLayout
    initial_mean: Tensor
    initial_variance: Tensor
    smooth: bool  # whether what a smoother needs is kept


Context = NodeContext[KalmanState, KalmanBound]

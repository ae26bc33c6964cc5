"""Hypotheses about noise, outliers and drift that a model is run under side by side."""

import math
from dataclasses import KW_ONLY, replace

from pydantic import Field

from pcnet.errors import SettingError
from pcnet.settings import settings

FOUND = (1 / 25, 1.0, 25.0)
GIVEN = (1 / 625, *FOUND, 625.0)
"""Factors of variances to start from, around a first guess that is found from the data, and around a given one."""


@settings
class Hypotheses:
    """A bank of hypotheses: copies of a graph that differ in what they assume, weighed by their predictive evidence.

    Each copy is a batch element of an ordinary run; beliefs of the model are those of the mixture. Copies start at
    several noise levels and learn them from there. Those that fall behind are dropped and those that have become equal
    are merged, so that a few are left after some hundred observations. Then copies with parameters that walk, slowly or
    fast, join them.

    Args:
        process_factors: Factors of the first guess of process variances to start from. Unless given: 1/625, 1/25, 1,
            25 and 625, and around guesses that are found from the first observations 1/25, 1 and 25.
        observation_factors: The same for the first guess of observation variances.
        contrast: Factor of the variance of one element of the process noise in further copies, in which the other
            elements have its inverse: how levels differ between elements is the least certain part of a guess. There
            are such copies for noise of two to four elements and several process factors; 1 for none.
        process_tilt: Prior log-weight per log of a process factor: too much noise is safer than too little.
        observation_tilt: The same for observation factors.
        outliers: Share of outliers that every other copy expects; 0 for no such copies.
        walks: Standard deviations of the walk of the parameters in one sampling interval, in prior standard deviations.
        walk_start: Observation at which copies with walks join.
        walk_cost: What they are behind then, in nats.
        walk_share: Share of the weight that each kind of walk, and standing still, gets for every 8 observations, after
            256 for every 64, and after 2048 for every 256.
        drop: Copies so many nats behind are dropped.
        merge: Copies whose log-levels all agree within this are merged, if their means agree within half an sd.
        guess: Names of precision nodes whose first guess is to be found from the first observations.
        told: Names of precision nodes whose level is known: it is the same in all copies.
    """

    _: KW_ONLY
    process_factors: tuple[float, ...] | None = None
    observation_factors: tuple[float, ...] | None = None
    contrast: float = Field(default=5.0, ge=1.0, lt=math.inf)
    process_tilt: float = 0.1
    observation_tilt: float = 0.4
    outliers: float = Field(default=0.05, ge=0.0, lt=0.5)
    walks: tuple[float, ...] = (0.005, 0.03)
    walk_start: int = Field(default=32, ge=1)
    walk_cost: float = 6.0
    walk_share: float = Field(default=2e-4, ge=0.0, lt=1.0)
    drop: float = Field(default=6.0, gt=0.0)
    merge: float = Field(default=0.25, ge=0.0)
    guess: tuple[str, ...] = ()
    told: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("process_factors", "observation_factors", "walks"):
            values = getattr(self, name)
            if values is None:
                continue
            if not all(0 < value < math.inf for value in values) or not (values or name == "walks"):
                raise SettingError(
                    f"Hypotheses: {name} must be positive numbers, such as (0.04, 1.0, 25.0), not {values}"
                )

    def around_found(self, process: bool, observations: bool) -> "Hypotheses":
        """The same, with fewer factors of the variances whose guess is found from the data, if they are not given."""
        return replace(
            self,
            process_factors=self.process_factors or (FOUND if process else None),
            observation_factors=self.observation_factors or (FOUND if observations else None),
        )

"""Observations that may be outliers: a normal one, or with a small probability one with far more noise."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, where

OUTLIER = 100.0  # variance that an outlier has more than usual noise, in variances of that


class OutlierRule(NamedTuple):
    """What an error says about an outlier, (B, d) each."""

    inflation: Tensor  # factor of the variance of the noise
    gain: Tensor  # what the log-evidence gains over that of a Gaussian with this noise


def expect_outliers(share: Tensor, error: Tensor, total: Tensor, noise: Tensor) -> OutlierRule:
    """The noise that each channel asks for.

    With ε the share of outliers and s the predicted variance of a channel, of which R is noise, the channel is an
    outlier with probability r ∝ ε N(e; 0, s + 100 R) against (1 − ε) N(e; 0, s). Its noise is then R/(1 − r + r/101).

    Args:
        share: ε, (B, 1).
        error: e, (B, d).
        total: s, (B, d).
        noise: R, (B, d).
    """
    e2, wide = error**2, total + OUTLIER * noise
    log_odds = (share / (1 - share)).log() + 0.5 * (e2 * (1 / total - 1 / wide) + (total / wide).log())
    less = (-log_odds.abs()).exp()  # the smaller of odds and 1/odds, which cannot overflow
    probability = where(log_odds > 0, 1.0, less) / (1 + less)
    log_total = log_odds.clamp_min(0.0) + (1 + less).log()  # log(1 + odds)
    inflation = 1 / (1 - probability + probability / (1 + OUTLIER))
    more = total + noise * (inflation - 1)
    gain = (1 - share).log() + log_total + 0.5 * (e2 / more - e2 / total + (more / total).log())
    return OutlierRule(inflation, gain)

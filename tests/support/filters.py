"""A single adaptive filter, without a bank of hypotheses, for tests of the rules that it consists of."""

from pcnet.graphs import adaptive_filter


def single_filter(flow, dim, dt, **options):
    """An adaptive filter with given first guesses, 1 unless others are given."""
    guesses = {"process_noise_sd": 1.0, "observation_noise_sd": 1.0, "hypotheses": None}
    return adaptive_filter(flow, dim, dt, **(guesses | options))

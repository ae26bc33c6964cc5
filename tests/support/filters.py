"""A single adaptive filter, without a bank of hypotheses, for tests of the rules that it consists of."""

import dataclasses

import pcnet as pc
from pcnet.graphs import adaptive_filter


def single_filter(flow, dim, dt, outliers=0.0, **options):
    """An adaptive filter with given first guesses, 1 unless others are given; outliers: their expected share."""
    guesses = {"process_noise_sd": 1.0, "observation_noise_sd": 1.0, "hypotheses": None}
    model = adaptive_filter(flow, dim, dt, **(guesses | options))
    if not outliers:
        return model
    sensor = dataclasses.replace(model.graph["y"], outliers=outliers)
    return pc.Model(model.graph.with_nodes({**model.graph.nodes, "y": sensor}), model.schedule)

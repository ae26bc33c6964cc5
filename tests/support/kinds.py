"""Adaptive filters of every kind with observations, for tests of files, the command line and sweeps."""

import numpy as np

import pcnet as pc
from pcnet.graphs import adaptive_filter
from pcnet.graphs.causes import Cause
from pcnet.graphs.sensors import Sensor
from pcnet.nodes import CategoricalNode

DECAY, PUSHED = pc.systems.linear([[-1.0]]), pc.systems.linear([[-1.0]], causes=[[1.0]])
Y = np.sin(0.1 * np.arange(60))[:, None] + 0.1 * np.random.default_rng(0).normal(size=(60, 1))
SINGLE = {"hypotheses": None, "process_noise_sd": 1.0, "observation_noise_sd": 0.3}


def switching(**options):
    pushes = CategoricalNode("push", values=[[0.0], [1.0]], stay=0.95)
    return adaptive_filter(PUSHED, 1, 0.1, switching=pushes, **options)


KINDS = {  # model, observations, options of `start`
    "bank": lambda: (adaptive_filter(DECAY, 1, 0.1), {"y": Y}, {}),
    "parameters": lambda: (
        adaptive_filter(lambda x, p: -p * x, 1, 0.1, parameter_mean=[1.0], parameter_sd=0.5),
        {"y": Y},
        {"on_divergence": "hold"},
    ),
    "smoothed bank": lambda: (adaptive_filter(DECAY, 1, 0.1), {"y": Y}, {"smooth": 5}),
    "smoothed": lambda: (adaptive_filter(DECAY, 1, 0.1, **SINGLE), {"y": Y}, {"smooth": 5}),
    "switching": lambda: (switching(), {"y": Y}, {}),
    "causes": lambda: (
        adaptive_filter(PUSHED, 1, 0.1, causes={"v": Cause(1, correlation_time=1.0)}),
        {"y": Y},
        {},
    ),
    "inputs": lambda: (adaptive_filter(PUSHED, 1, 0.1, inputs={"u": 1}), {"y": Y, "u": np.cos(Y)}, {}),
    "sensors": lambda: (
        adaptive_filter(DECAY, 1, 0.1, sensors={"a": Sensor(), "b": Sensor(noise_sd=0.2)}),
        {"a": Y, "b": Y + 0.1},
        {},
    ),
    "counts": lambda: (
        adaptive_filter(DECAY, 1, 0.1, sensors={"c": Sensor(family="poisson")}),
        {"c": np.abs(np.round(3 * Y))},
        {},
    ),
    "peaks": lambda: (
        adaptive_filter(
            lambda x, _: x - x**3, 1, 0.1, mapping=lambda x, _: x**2, peaks=4, initial_mean=[0.0], **SINGLE
        ),
        {"y": Y**2},
        {"on_divergence": "hold"},
    ),
    "cubature": lambda: (adaptive_filter(DECAY, 1, 0.1, linearisation="cubature"), {"y": Y}, {}),
}


def rows(data, begin, end):
    """Observations one by one."""
    return [{name: values[k] for name, values in data.items()} for k in range(begin, end)]

"""Random calls of the public interface with arguments of wrong kinds: which of them raise errors without a name."""

import collections
import inspect
import math
import random
import traceback
import warnings

import numpy as np
import torch

import pcnet as pc
from pcnet.errors import PcnetError
from pcnet.graphs import adaptive_filter, odem
from pcnet.nodes import GeneralisedStateNode, KalmanStateNode, ParameterNode, PrecisionNode, SensoryNode

WRONG = [
    *(None, True, -1, 0, 3, 2.5, math.nan, math.inf, 1e300, 10**400, 1 + 2j, -2.5),
    *("x", "", "x" * 300, "a\0b", b"x", "hold", torch.float64, np.datetime64("2020-01-01")),
    *([], [1, 2], (), {}, {"y": 1}, set(), [None], [[1], [2, 3]], object(), lambda *_: 1),
    *(np.array([]), torch.tensor([1.0, 2.0]), np.array(["a"])),
]
PATHS = ["", None, 3, "a\0b", "x" * 300, [], object()]
SEEN = 1 + 0.1 * np.random.default_rng(0).normal(size=(6, 3))
RUN = ["record", "dtype", "device", "threads", "on_divergence", "engine", "screen"]
FLOW = pc.systems.lotka_volterra


class Fuzz:
    """Random calls, from a seed."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.model = odem(orders=2)
        levels = {"hypotheses": None, "process_noise_sd": 0.1, "observation_noise_sd": 0.1}
        known = {"parameter_mean": [0.3, -0.2, 0.3], "parameter_sd": 0.25}
        self.filter = adaptive_filter(FLOW, 3, 0.01, **known, **levels)
        self.result = self.model.run(SEEN)
        self.sessions = [self.model.start().run(SEEN), self.filter.start(engine="eager").run(SEEN)]

    def calls(self):
        """All calls by name."""
        pick, result, model, session = self.chance.choice, self.result, self.model, self.chance.choice(self.sessions)

        def wrong(*right):
            return pick([*WRONG, *right * 8])

        def some(names):
            return {pick(list(names)): wrong() for _ in range(self.chance.randint(1, 2))}

        options = [name for name in inspect.signature(adaptive_filter).parameters if name not in ("flow", "dim", "dt")]
        fit = {pick(["max_iterations", "tolerance", "slopes", "times"]): pick([None, "x", [], -1, math.nan])}
        return {
            "graphs.odem": lambda: odem(**some(inspect.signature(odem).parameters)),
            "graphs.adaptive_filter": lambda: adaptive_filter(FLOW, 3, 0.01, **some(options)),
            "graphs.adaptive_filter, required": lambda: adaptive_filter(wrong(FLOW), wrong(3), wrong(0.01)),
            "adaptive_filtering": lambda: pc.adaptive_filtering(**some(["every", "levels", "learn_every"])),
            "odem": lambda: pc.odem(**some(["every", "periods"])),
            "batch": lambda: pc.batch(wrong()),
            "act": lambda: pc.act(wrong("update"), wrong("state"), **some(["every", "repeats", "exclude"])),
            "start": lambda: model.start(**some(RUN)),
            "start, filter": lambda: self.filter.start(**some(RUN)),
            "run": lambda: model.run(wrong(), progress=False, engine="eager"),
            "run, times": lambda: model.run(SEEN, times=wrong(), progress=False, engine="eager"),
            "step": lambda: model.start(engine="eager").step(wrong()),
            "result.get": lambda: result.get(wrong("x"), wrong("mean")),
            "result.interval": lambda: result.interval(wrong("x"), wrong(0.9)),
            "result.element": lambda: result.element(wrong()),
            "result.single": lambda: result.single(wrong()),
            "result.message": lambda: result.message(wrong(), wrong()),
            "result.error_flow": lambda: result.error_flow(wrong()),
            "session.read": lambda: session.read(wrong("x"), wrong("mean")),
            "session.innovation": lambda: session.innovation(wrong(SEEN[0])),
            "session.forecast": lambda: session.forecast(pick([-1, "x", None, math.nan, 0.02]), pick([None, "x", []])),
            "session.sample": lambda: session.sample(0.02, pick([1, -1, "x", None, 2.5, []]), seed=wrong(1)),
            "session.save": lambda: session.save(pick(PATHS)),
            "result.save": lambda: result.save(pick(PATHS)),
            "model.save": lambda: model.save(pick(PATHS)),
            "resume": lambda: pc.resume(wrong()),
            "Model.load": lambda: pc.Model.load(wrong()),
            "Result.load": lambda: pc.Result.load(wrong()),
            "Study.open": lambda: pc.Study.open(wrong()),
            "Model": lambda: pc.Model(wrong(), wrong()),
            "register": lambda: pc.register(pick([3, "", None, [], "a\0"]), wrong()),
            "fit": lambda: model.fit(SEEN, **fit, progress=False, engine="eager"),
            "ParameterNode": lambda: ParameterNode(wrong("a"), mean=wrong(0.1), sd=wrong(1.0)),
            "PrecisionNode": lambda: PrecisionNode(wrong("a"), prior_precision=wrong(1.0), sd=wrong(1.0)),
            "SensoryNode": lambda: SensoryNode(wrong("a"), dim=wrong(1), orders=wrong(1), dt=wrong(0.1)),
            "GeneralisedStateNode": lambda: GeneralisedStateNode(wrong("a"), dim=wrong(1), flow=wrong(FLOW)),
            "KalmanStateNode": lambda: KalmanStateNode(wrong("a"), dim=wrong(1), flow=wrong(FLOW)),
            "Record": lambda: pc.Record(wrong(("mean",)), wrong()),
            "graph.predicts": lambda: pc.Graph().predicts(wrong(), wrong()),
            "glv_process": lambda: pc.simulate.glv_process(pick([5, -1, "x", None, []]), **some(["noise", "seed"])),
            "sweep": lambda: pc.sweep(wrong(), wrong(), wrong(), progress=False, processes=1),
        }

    def run(self, count):
        """Make so many calls; how often each kind of error without a name was raised, and where."""
        unnamed = collections.Counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(count):
                name, call = self.chance.choice(list(self.calls().items()))
                try:
                    call()
                except PcnetError:
                    pass
                except Exception as error:
                    place = traceback.extract_tb(error.__traceback__)[-1]
                    unnamed[name, type(error).__name__, f"{place.filename}:{place.lineno}", str(error)[:80]] += 1
        return unnamed

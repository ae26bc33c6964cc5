"""FitzHugh–Nagumo neuron, potential seen: a bootstrap filter of particles, which is told parameters and noise."""

import sys

import numpy as np
import particles
from particles import distributions as dists
from particles import state_space_models as ssm
from particles.collectors import Moments

y = np.load(sys.argv[1])
dt = 0.2


def neuron(x):
    return np.column_stack([x[:, 0] - x[:, 0] ** 3 / 3 - x[:, 1] + 0.5, 0.08 * (x[:, 0] + 0.7 - 0.8 * x[:, 1])])


def step(x):
    h = dt / 2
    for _ in range(2):
        k1 = neuron(x)
        k2 = neuron(x + 0.5 * h * k1)
        k3 = neuron(x + 0.5 * h * k2)
        k4 = neuron(x + h * k3)
        x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return x


class Neuron(ssm.StateSpaceModel):
    def PX0(self):  # noqa: N802
        return dists.IndepProd(dists.Normal(scale=0.5), dists.Normal(scale=0.5))

    def PX(self, t, xp):  # noqa: N802
        mean = step(xp)
        return dists.IndepProd(
            dists.Normal(loc=mean[:, 0], scale=0.05 * dt**0.5), dists.Normal(loc=mean[:, 1], scale=0.02 * dt**0.5)
        )

    def PY(self, t, xp, x):  # noqa: N802
        return dists.Normal(loc=x[:, 0], scale=0.2)


smc = particles.SMC(fk=ssm.Bootstrap(ssm=Neuron(), data=y), N=1000, resampling="systematic", collect=[Moments()])
smc.run()
print(smc.summaries.moments[-1]["mean"], np.sqrt(smc.summaries.moments[-1]["var"]))

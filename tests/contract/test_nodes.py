"""Every kind of node keeps the contract; so does one that the machinery has never heard of."""

import pytest
import torch
from contract import NodeContract
from models import tensor
from student_t import StudentTSensoryNode

import pcnet as pc
from pcnet.nodes import GeneralisedStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.estimators import Exponential, Newton, RobbinsMonro, WindowMean
from pcnet.numerics.integrators import LocalLinearisation


class Small(NodeContract):
    """A Lotka–Volterra state seen through a linear mapping of unknown gain."""

    sensor = SensoryNode
    curvature = "exact"
    channels = "shared"

    def slow(self, scale):
        return RobbinsMonro(0.01 * scale, 1.0, 0.5, Exponential(0.2))

    def build(self, scale):
        start = 0.5 * torch.tensor([[1.0, 0.7, 1.3], [0.1, -0.2, 0.1], [0.0, 0.1, 0.0]], dtype=torch.float64)
        x = GeneralisedStateNode(
            "x",
            dim=3,
            orders=3,
            flow=pc.systems.lotka_volterra,
            initial_mean=start * scale[..., None, None],
            integrator=LocalLinearisation(kappa=0.3 * scale, step_size=0.02),
            curvature=self.curvature,
        )
        y = self.sensor("y", dim=2, orders=2, dt=0.1)
        a = ParameterNode(
            "a",
            mean=tensor(0.3, -0.2, 0.3) * scale[..., None],
            sd=0.25,
            estimator=self.slow(scale),
            curvature=self.curvature,
        )
        gain = ParameterNode(
            "gain",
            mean=tensor(1.0, 0.5),
            sd=scale[..., None],
            estimator=RobbinsMonro(0.01, averaging=WindowMean()),
            curvature=self.curvature,
        )
        graph = pc.Graph()
        graph.predicts(x, y, via=MAPPING)
        graph.parametrises(a, x)
        graph.parametrises(gain, x, of=y)
        expected = 4.0 * scale[..., None]
        graph.weighs(
            PrecisionNode(
                "noise_x", prior_precision=expected, sd=0.3, correlation_time=0.5 * scale, curvature=self.curvature
            ),
            x,
        )
        graph.weighs(
            PrecisionNode(
                "noise_y",
                prior_precision=expected,
                sd=0.3,
                correlation_time=0.5,
                channels=self.channels,
                curvature=self.curvature,
            ),
            y,
        )
        return graph

    def observations(self):
        times = torch.arange(8, dtype=torch.float64)
        return {"y": torch.stack([times.sin() + 1, (0.7 * times).cos() + 1], -1)}


def gains(x, parameters):
    return x[..., :2] * parameters + 0.1 * x[..., 1:] ** 2


MAPPING = pc.TracedFunction(gains)


class TestStateNode(Small):
    name = "x"


class TestStateNodeWithGaussNewton(Small):
    name = "x"
    curvature = "gauss-newton"


class TestSensoryNode(Small):
    name = "y"


class TestParameterNode(Small):
    name = "a"


class TestParameterNodeByNewton(Small):
    name = "a"
    curvature = "gauss-newton"

    def slow(self, scale):
        return Newton(forgetting_factor=0.1 * scale)


class TestParameterOfAMapping(Small):
    name = "gain"


class TestPrecisionNode(Small):
    name = "noise_x"


class TestSharedPrecisionNode(Small):
    name = "noise_y"


class TestFullPrecisionNode(Small):
    name = "noise_y"
    channels = "full"

    def test_it_learns_how_noise_is_correlated(self):
        """Errors that nothing explains: the precision that fits best is the inverse of their second moment."""
        generator = torch.Generator().manual_seed(3)
        root = torch.tensor([[1.0, 0.0, 0.0], [0.8, 0.5, 0.0], [-0.6, 0.3, 0.7]], dtype=torch.float64)
        errors = torch.randn(12, 3, generator=generator, dtype=torch.float64) @ root.T
        x = GeneralisedStateNode("x", dim=3, orders=1, flow=lambda x, theta: 0 * x, initial_mean=torch.zeros(1, 3))
        y = SensoryNode("y", dim=3, orders=1)
        slow = RobbinsMonro(0.15, 0.0, 0.0, WindowMean())
        noise = PrecisionNode(
            "n", mean=0.0, sd=50.0, coupling_sd=50.0, correlation_time=1.0, channels="full", estimator=slow
        )
        graph = pc.Graph()
        graph.predicts(x, y)
        graph.weighs(PrecisionNode("nx", prior_precision=1.0, sd=0.1, correlation_time=1.0), x)
        graph.weighs(noise, y)
        acts = (pc.act("observe", "y"), pc.act("accumulate", "n"), pc.act("update", "n", every=12))
        session = graph.start(pc.Schedule(acts=acts), record=())
        session.run(errors.repeat(600, 1))
        expected = torch.linalg.inv(errors.T @ errors / 12)
        torch.testing.assert_close(session.read("n", "matrix"), expected, rtol=2e-3, atol=2e-3)


class TestFullPrecisionNodeWithGaussNewton(TestFullPrecisionNode):
    curvature = "gauss-newton"


class TestStudentT(Small):
    """A new kind of node, shipped as an example: no part of the machinery knows it."""

    name = "y"
    sensor = StudentTSensoryNode

    def test_its_neighbours_feel_the_heavy_tails(self):
        """The gradients of all nodes around it are the slopes of an energy that now has Student-t errors."""
        for name in ("x", "noise_y", "gain"):
            self.name = name
            self.test_gradient_is_the_slope_of_the_free_energy()

    def test_exact_curvature_is_the_slope_of_the_gradient(self):
        session = self.session(scale=torch.tensor(1.0, dtype=torch.float64))
        for name in ("x", "noise_y", "gain"):
            node, local = session.graph[name], session.context(name)
            with torch.inference_mode():
                state, hessian = local.state, node.hessian(local)[0]
                for i in range(len(hessian)):
                    sides = []
                    for h in (1e-5, -1e-5):
                        mean = state.mean.clone()
                        mean.view(-1)[i] += h
                        local.propose(state._replace(mean=mean))
                        sides.append(node.gradient(local)[0])
                    local.propose(state)
                    torch.testing.assert_close(hessian[i], (sides[0] - sides[1]) / 2e-5, rtol=1e-4, atol=1e-4)

    def test_it_is_heavy_tailed_in_each_channel_by_itself(self):
        self.channels = "full"
        with pytest.raises(pc.errors.GraphError, match="'noise_y' couples them"):
            self.session()

    def test_many_degrees_of_freedom_are_gaussian(self):
        class Nearly(StudentTSensoryNode):
            def __post_init__(self):
                object.__setattr__(self, "degrees", torch.tensor(1e9, dtype=torch.float64))

        scale = torch.tensor(1.0, dtype=torch.float64)
        self.sensor = SensoryNode
        gaussian = self.run(scale)
        self.sensor = Nearly
        heavy = self.run(scale)
        for key in ("x.mean", "a.mean", "noise_y.mean", "accuracy", "complexity"):
            torch.testing.assert_close(
                torch.as_tensor(heavy.traces[key].values),
                torch.as_tensor(gaussian.traces[key].values),
                rtol=1e-6,
                atol=1e-6,
            )

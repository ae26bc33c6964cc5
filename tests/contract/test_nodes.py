"""Every kind of node keeps the contract, also one that is defined outside pcnet."""

import pytest
import torch
from student_t import StudentTSensoryNode

import pcnet as pc
from pcnet.model.schedule import adaptive_filtering
from pcnet.nodes import (
    CategoricalNode,
    CauseNode,
    GaussianSumStateNode,
    GeneralisedStateNode,
    KalmanCauseNode,
    KalmanStateNode,
    ParameterNode,
    PrecisionNode,
    SensoryNode,
    SwitchingStateNode,
)
from pcnet.numerics.estimators import Exponential, Newton, NoiseScoring, RobbinsMonro, WindowMean
from pcnet.numerics.integrators import LocalLinearisation
from support.contract import NodeContract
from support.kalman import BENT_FLOW, BENT_MAPPING, DT, FIRST
from support.levels import OBSERVATIONS, VALUES, switching
from support.models import FLOWS, tensor


class GeneralisedModel(NodeContract):
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


class TestGeneralisedStateNode(GeneralisedModel):
    name = "x"


class TestGeneralisedStateNodeWithGaussNewton(GeneralisedModel):
    name = "x"
    curvature = "gauss-newton"


class TestSensoryNode(GeneralisedModel):
    name = "y"


class TestParameterNode(GeneralisedModel):
    name = "a"


class TestParameterNodeByNewton(GeneralisedModel):
    name = "a"
    curvature = "gauss-newton"

    def slow(self, scale):
        return Newton(forgetting_factor=0.1 * scale)


class TestParameterOfAMapping(GeneralisedModel):
    name = "gain"


class TestPrecisionNode(GeneralisedModel):
    name = "noise_x"


class TestSharedPrecisionNode(GeneralisedModel):
    name = "noise_y"


class TestFullPrecisionNode(GeneralisedModel):
    name = "noise_y"
    channels = "full"


class TestFullPrecisionNodeWithGaussNewton(TestFullPrecisionNode):
    curvature = "gauss-newton"


def test_a_full_precision_matrix_learns_the_correlation_of_noise():
    """The maximum-likelihood precision is the inverse of the second moment of the errors."""
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
    session.run(errors.repeat(300, 1))
    expected = torch.linalg.inv(errors.T @ errors / 12)
    torch.testing.assert_close(session.read("n", "matrix"), expected, rtol=2e-3, atol=2e-3)


class TestStudentT(GeneralisedModel):
    """A new kind of node, shipped as an example: no part of the machinery knows it."""

    name = "y"
    sensor = StudentTSensoryNode

    def test_gradients_of_its_neighbours_are_those_of_a_student_t_energy(self):
        for name in ("x", "noise_y", "gain"):
            self.name = name
            self.test_gradient_is_the_slope_of_the_free_energy()

    def test_exact_curvature_is_the_derivative_of_the_gradient(self):
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

    def test_coupled_channels_are_rejected(self):
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


class KalmanModel(NodeContract):
    schedule = adaptive_filtering()
    estimator = Newton(decaying_forgetting=0.5)

    def build(self, scale):
        x = KalmanStateNode("x", dim=2, flow=BENT_FLOW, initial_mean=torch.from_numpy(FIRST) * scale[..., None])
        y = SensoryNode("y", dim=3, orders=1, dt=DT)
        graph = pc.Graph()
        graph.predicts(x, y, via=BENT_MAPPING)
        fast = self.estimator
        graph.parametrises(ParameterNode("theta", mean=[0.8, 0.3], sd=scale[..., None], estimator=fast), x)
        graph.parametrises(ParameterNode("gain", mean=[1.1], sd=0.3, estimator=fast), x, of=y)
        level = NoiseScoring(max_step=0.3)
        graph.weighs(
            PrecisionNode("noise_x", mean=scale[..., None], sd=1.0, correlation_time=0.4 * scale, estimator=level), x
        )
        graph.weighs(PrecisionNode("noise_y", mean=[0.7, 1.2, 0.3], sd=1.0, correlation_time=0.4, estimator=level), y)
        return graph

    def observations(self):
        times = 0.3 * torch.arange(25, dtype=torch.float64)
        return {"y": torch.stack([times.sin(), (0.7 * times).cos(), 0.3 + 0.1 * times.sin()], -1)}


class TestKalmanStateNode(KalmanModel):
    name = "x"


class TestKalmanStateNodeWithItsParameters(KalmanModel):
    name = "x"
    estimator = None


class TestParameterNodeOfAKalmanState(KalmanModel):
    name = "theta"
    test_gradient_is_the_slope_of_the_free_energy = None  # it is that of the whole past


class TestParameterNodeInTheBeliefOfAKalmanState(KalmanModel):
    name = "theta"
    estimator = None
    test_gradient_is_the_slope_of_the_free_energy = None


class TestPrecisionNodeOfAKalmanState(KalmanModel):
    name = "noise_y"
    test_gradient_is_the_slope_of_the_free_energy = None


class TestCauseNode(NodeContract):
    name = "v"

    def build(self, scale):
        x = GeneralisedStateNode(
            "x",
            dim=2,
            orders=3,
            flow=FLOWS[2],
            initial_mean=[[0.3, 0.3]] * 3,
            integrator=LocalLinearisation(step_size=0.05),
        )
        v = CauseNode(
            "v",
            dim=1,
            orders=2,
            prior=scale[..., None] if scale.dim() else scale,
            integrator=LocalLinearisation(step_size=0.05),
        )
        y = SensoryNode("y", dim=2, orders=2, dt=0.1)
        theta = ParameterNode("theta", mean=[0.5], sd=0.5)
        graph = pc.Graph()
        graph.predicts(x, y)
        graph.drives(v, x)
        graph.parametrises(theta, x)
        for node in (x, v, y):
            graph.weighs(PrecisionNode(f"n{node.name}", prior_precision=3.0, sd=0.5, correlation_time=0.5), node)
        return graph

    def observations(self):
        return {"y": torch.randn(8, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)}


class TestCategoricalNode(NodeContract):
    name = "which"
    schedule = switching(3)[1]

    def build(self, scale):
        graph = switching(3)[0]
        nodes = {**graph.nodes, "which": CategoricalNode("which", values=VALUES, stay=0.5 + 0.2 * scale)}
        return graph.with_nodes(nodes)

    def observations(self):
        return {"y": torch.from_numpy(OBSERVATIONS)}


def pushed(x, v, theta):
    return BENT_FLOW(x, theta) + v


class SwitchingModel(KalmanModel):
    """Modes with parameters in the belief, coloured process noise, and settings that differ over the batch."""

    def build(self, scale):
        x = SwitchingStateNode("x", dim=2, flow=pushed, initial_mean=torch.from_numpy(FIRST) * scale[..., None])
        y = SensoryNode("y", dim=3, orders=1, dt=DT)
        graph = pc.Graph()
        graph.predicts(x, y, via=BENT_MAPPING)
        values = torch.tensor([[0.0, 0.0], [0.5, -0.5]], dtype=torch.float64) * scale[..., None, None]
        graph.drives(CategoricalNode("mode", values=values, stay=0.5 + 0.2 * scale), x)
        graph.parametrises(ParameterNode("theta", mean=[0.8, 0.3], sd=scale[..., None]), x)
        graph.parametrises(ParameterNode("gain", mean=[1.1], sd=0.3), x, of=y)
        graph.weighs(PrecisionNode("noise_x", mean=scale[..., None], sd=1.0, correlation_time=0.4 * scale), x)
        graph.weighs(PrecisionNode("noise_y", mean=[0.7, 1.2, 0.3], sd=1.0, kernel=pc.kernels.White()), y)
        return graph


class TestSwitchingStateNode(SwitchingModel):
    name = "x"


class TestCategoryOfASwitchingState(SwitchingModel):
    name = "mode"


class SeveralPeaksModel(KalmanModel):
    """A sum of Gaussians with parameters in the belief, and settings that differ over the batch."""

    def build(self, scale):
        first = torch.from_numpy(FIRST) * scale[..., None]
        x, y = (
            GaussianSumStateNode("x", dim=2, flow=BENT_FLOW, initial_mean=first, peaks=3),
            SensoryNode("y", dim=3, orders=1, dt=DT),
        )
        graph = pc.Graph()
        graph.predicts(x, y, via=BENT_MAPPING)
        graph.parametrises(ParameterNode("theta", mean=[0.8, 0.3], sd=scale[..., None]), x)
        graph.parametrises(ParameterNode("gain", mean=[1.1], sd=0.3), x, of=y)
        graph.weighs(PrecisionNode("noise_x", mean=scale[..., None], sd=1.0, correlation_time=0.4 * scale), x)
        graph.weighs(PrecisionNode("noise_y", mean=[0.7, 1.2, 0.3], sd=1.0, kernel=pc.kernels.White()), y)
        return graph


class TestGaussianSumStateNode(SeveralPeaksModel):
    name = "x"


class CauseModel(KalmanModel):
    """A cause with parameters and coloured noise of its own, and settings that differ over the batch."""

    def build(self, scale):
        x = KalmanStateNode("x", dim=2, flow=pushed, initial_mean=torch.from_numpy(FIRST) * scale[..., None])
        v = KalmanCauseNode("v", dim=2, flow=lambda v, theta: -theta * v.sin(), initial_sd=0.5 * scale[..., None])
        y = SensoryNode("y", dim=3, orders=1, dt=DT)
        graph = pc.Graph()
        graph.predicts(x, y, via=BENT_MAPPING)
        graph.drives(v, x)
        graph.parametrises(ParameterNode("theta", mean=[0.8, 0.3], sd=scale[..., None]), x)
        graph.parametrises(ParameterNode("rate", mean=[0.5], sd=0.2), v)
        graph.parametrises(ParameterNode("gain", mean=[1.1], sd=0.3), x, of=y)
        graph.weighs(PrecisionNode("noise_x", mean=scale[..., None], sd=1.0, kernel=pc.kernels.White()), x)
        graph.weighs(PrecisionNode("noise_v", mean=scale[..., None], sd=1.0, correlation_time=0.4 * scale), v)
        graph.weighs(PrecisionNode("noise_y", mean=[0.7, 1.2, 0.3], sd=1.0, kernel=pc.kernels.White()), y)
        return graph


class TestKalmanCauseNode(CauseModel):
    name = "v"


class TestKalmanStateNodeWithACause(CauseModel):
    name = "x"


class TestParameterOfAKalmanCause(CauseModel):
    name = "rate"
    test_gradient_is_the_slope_of_the_free_energy = None


def test_a_resumed_batch_of_kalman_states_is_equal_to_the_bit(tmp_path):
    contract = KalmanModel()
    data = contract.observations()["y"]
    whole = contract.build(contract.scales).start(contract.schedule, record=()).run(data)
    half = contract.build(contract.scales).start(contract.schedule, record=()).run(data[:11])
    path = half.save(tmp_path / "half.pcnet")
    again = pc.resume(path, pc.Model(contract.build(contract.scales), contract.schedule)).run(data[11:])
    for name in ("x", "theta", "noise_x", "noise_y"):
        assert torch.equal(whole.mean(name), again.mean(name))
        assert torch.equal(whole.sd(name), again.sd(name))

"""Flows and mappings in generalised coordinates, against autograd of f̃ = (f, J x', J x'', …)."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn
from torch.func import jacrev

from pcnet.errors import GraphError, SettingError
from pcnet.functions.base import Function
from pcnet.functions.closed_form import Identity, Quadratic
from pcnet.functions.linearisation import Linearisation
from pcnet.functions.systems import Linear, Lorenz, LotkaVolterra, linear, lorenz, lorenz96, lotka_volterra, van_der_pol
from pcnet.functions.traced import TracedFunction, as_function
from pcnet.numerics.precision import CholeskyPrecision, Precision
from support.derivatives import Plain, agree, close, expect

F64, F32 = torch.float64, torch.float32


# --- the oracle: one element, no batch --------------------------------------------------------------------------------


# --- what is tried: every function beside the same one written out here -----------------------------------------------
def lorenz_by_hand(x: Tensor, theta: Tensor) -> Tensor:
    a, b, c = x.unbind(-1)
    return torch.stack([10 * (b - a), a * (theta[..., 0] - c) - b, a * b - 8 / 3 * c], -1)


def other_lorenz_by_hand(x: Tensor, theta: Tensor) -> Tensor:
    a, b, c = x.unbind(-1)
    return torch.stack([3 * (b - a), a * (theta[..., 0] - c) - b, a * b - 0.5 * c], -1)


def lotka_volterra_by_hand(growth: list[float]) -> Plain:
    n = len(growth)
    upper = np.zeros((n * (n - 1) // 2, n, n))
    upper[range(len(upper)), *np.triu_indices(n, 1)] = 1.0
    basis = torch.tensor(upper - upper.transpose(0, 2, 1)).flatten(1)  # A = Σ θ_q (E_ij − E_ji)

    def flow(x: Tensor, theta: Tensor) -> Tensor:
        a = (theta @ basis.to(theta)).unflatten(-1, (n, n))
        return x * (torch.tensor(growth).to(x) + (a @ x[..., None])[..., 0])

    return flow


MATRIX = torch.tensor([[-1.0, 2.0, 0.5], [0.0, -0.3, 1.5]], dtype=F64)  # of three states, two are seen
OFFSET = torch.tensor([0.7, -0.2], dtype=F64)
SQUARE = torch.tensor([[-1.0, 2.0], [-0.5, -0.3]], dtype=F64)


def affine_by_hand(x: Tensor, theta: Tensor) -> Tensor:
    return (MATRIX.to(x) * x[..., None, :]).sum(-1) + OFFSET.to(x)


def square_by_hand(x: Tensor, theta: Tensor) -> Tensor:
    return (SQUARE.to(x) * x[..., None, :]).sum(-1)


def learned_by_hand(x: Tensor, theta: Tensor) -> Tensor:
    return (theta.unflatten(-1, (2, 2)) * x[..., None, :]).sum(-1) + OFFSET.to(x)


def van_der_pol_by_hand(x: Tensor, theta: Tensor) -> Tensor:
    a, b = x.unbind(-1)
    return torch.stack([b, theta[..., 0] * b - theta[..., 0] * b * a * a - a], -1)


def lorenz96_by_hand(x: Tensor, theta: Tensor) -> Tensor:
    n = x.shape[-1]
    rows = [(x[..., (i + 1) % n] - x[..., i - 2]) * x[..., i - 1] - x[..., i] + theta[..., 0] for i in range(n)]
    return torch.stack(rows, -1)


def wave(x: Tensor, theta: Tensor) -> Tensor:
    """sin(θx) of each state times the other one: bends in x and in θ, and in both together."""
    return torch.sin(theta * x) * x.roll(1, -1)


class Network(nn.Module):
    """A small perceptron of (x, θ)."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.layers = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).to(F64)

    def forward(self, x: Tensor, theta: Tensor) -> Tensor:
        out: Tensor = self.layers(torch.cat([x, theta], -1))
        return out


NETWORK = Network()
GROWTH = [0.3, -0.7, 0.0, 1.1, -0.2]


class Shape(NamedTuple):
    batch: int
    orders: int
    rows: int
    dtype: torch.dtype = F64


ALL_SHAPES = tuple(
    Shape(batch, orders, rows, dtype)
    for orders, rows in ((1, 1), (3, 1), (3, 2), (3, 3), (4, 3))
    for batch in (1, 4)
    for dtype in (F64, F32)
)


class Case(NamedTuple):
    function: Function
    by_hand: Plain
    dim: int
    out: int
    parameters: int
    shapes: tuple[Shape, ...] = ALL_SHAPES


CLOSED = {
    "lorenz": Case(lorenz, lorenz_by_hand, 3, 3, 1),
    "lorenz, other constants": Case(Lorenz(sigma=3.0, beta=0.5), other_lorenz_by_hand, 3, 3, 1),
    "lotka-volterra": Case(lotka_volterra, lotka_volterra_by_hand([0.0, 0.0, 0.0]), 3, 3, 3),
    "lotka-volterra, 5 species": Case(LotkaVolterra(5, torch.tensor(GROWTH)), lotka_volterra_by_hand(GROWTH), 5, 5, 10),
    "linear": Case(linear(SQUARE), square_by_hand, 2, 2, 0),
    "linear, offset, not square": Case(Linear(MATRIX, OFFSET), affine_by_hand, 3, 2, 0),
    "linear, learned": Case(Linear(dim=2, offset=OFFSET), learned_by_hand, 2, 2, 4),
    "identity": Case(Identity(), lambda x, theta: x, 3, 3, 2),
}
TRACED = {  # to trace a function for one more shape takes time, so that each is tried with a few of them
    "van der pol": Case(as_function(van_der_pol), van_der_pol_by_hand, 2, 2, 1, (Shape(1, 3, 1, F32),)),
    "lorenz 96": Case(as_function(lorenz96), lorenz96_by_hand, 5, 5, 1, (Shape(4, 2, 2),)),
    "network": Case(TracedFunction(NETWORK), NETWORK, 3, 2, 2, (Shape(4, 3, 1),)),
    "wave": Case(TracedFunction(wave), wave, 2, 2, 2, (Shape(4, 3, 2),)),
}
CASES = CLOSED | TRACED
numbers = st.floats(-3.0, 3.0, allow_subnormal=False)


@st.composite
def points(draw: st.DrawFn, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    batch, orders, rows, dtype = draw(st.sampled_from(case.shapes))
    shapes = (batch, orders, case.dim), (batch, case.parameters), (batch, rows, case.out)
    x, theta, weights = (
        torch.tensor(draw(hnp.arrays(float, shape, elements=numbers)), dtype=dtype) for shape in shapes
    )
    return x, theta, weights


@pytest.mark.parametrize("name", CASES)
@hypothesis_settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_function_agrees_with_autograd(name, data):
    case = CASES[name]
    agree(case.function, case.by_hand, *data.draw(points(case)))


def agree_in_shapes(case: Case, shapes: tuple[Shape, ...]) -> None:
    for batch, orders, rows, dtype in shapes:
        random = torch.Generator().manual_seed(batch + 10 * orders + 100 * rows)
        sizes = (batch, orders, case.dim), (batch, case.parameters), (batch, rows, case.out)
        agree(case.function, case.by_hand, *(torch.randn(s, generator=random, dtype=F64).to(dtype) for s in sizes))


@pytest.mark.parametrize("name", CASES)
def test_shapes(name):
    """Every shape once; hypothesis picks some in the test above."""
    shapes = CASES[name].shapes
    agree_in_shapes(CASES[name], shapes if name in TRACED or name == "lotka-volterra" else shapes[1::5])


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_every_shape(name):
    single = [shape for shape in ALL_SHAPES if shape.dtype == F64 or name != "network"]  # its weights are in double
    agree_in_shapes(TRACED[name], tuple(single))


# --- closed forms and derived ones ------------------------------------------------------------------------------------
@hypothesis_settings(max_examples=15, deadline=None)
@given(
    c=hnp.arrays(float, (2, 4, 4, 3), elements=numbers),
    x=hnp.arrays(float, (2, 3, 3), elements=numbers),
    theta=hnp.arrays(float, (2, 2), elements=numbers),
    weights=hnp.arrays(float, (2, 2, 2), elements=numbers),
)
def test_any_quadratic_agrees_with_autograd(c, x, theta, weights):
    """Coefficients need not be symmetric, nor the numbers of outputs and states equal."""

    def by_hand(x: Tensor, theta: Tensor) -> Tensor:
        z, w = (torch.cat([torch.ones(*v.shape[:-1], 1, dtype=F64), v], -1) for v in (x, theta))
        return torch.stack(
            [((torch.tensor(a) @ w[..., None, :, None])[..., 0] @ z[..., :, None])[..., 0] @ z for a in c]
        )

    agree(Quadratic(torch.tensor(c)), by_hand, *(torch.tensor(v) for v in (x, theta, weights)))


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("lorenz", "lotka-volterra, 5 species")]


@pytest.mark.parametrize("name", ["linear, learned", *SLOW])
def test_closed_forms_equal_traced_functions(name):
    case, rows = CASES[name], 1 if name == "linear, learned" else 3
    derived, random = TracedFunction(case.by_hand), torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, case.dim, generator=random, dtype=F64)
    theta = torch.randn(4, case.parameters, generator=random, dtype=F64)
    weights = torch.randn(4, rows, case.out, generator=random, dtype=F64)
    close(case.function(x[:, 0], theta), derived(x[:, 0], theta), F64)
    ours, other = case.function.linearise(x, theta, rows), derived.linearise(x, theta, rows)
    close(ours.value, other.value, F64)
    close(ours.slope, other.slope, F64)
    contracted_hessian, derived_curve = (
        case.function.contracted_hessian(x, theta, weights),
        derived.contracted_hessian(x, theta, weights),
    )
    if contracted_hessian is None:
        assert derived_curve is None
    else:
        close(contracted_hessian, derived_curve, F64)
    close(case.function.parameter_slope(x, theta, rows), derived.parameter_slope(x, theta, rows), F64)
    assert case.function.parameter_contracted_hessian(x, theta, weights) is None
    assert derived.parameter_contracted_hessian(x, theta, weights) is None


def test_a_traced_function_without_parameters():
    function, random = TracedFunction(affine_by_hand), torch.Generator().manual_seed(1)
    x, theta, weights = (torch.randn(s, generator=random, dtype=F64) for s in ((2, 2, 3), (2, 0), (2, 2, 2)))
    expected = expect(affine_by_hand, x, theta, weights)
    line = function.linearise(x, theta, 2)
    close(line.value, expected.value, F64)
    close(line.slope, expected.slope, F64)


@pytest.mark.parametrize("batch", [1, 2])
def test_slopes_of_a_traced_function_without_parameters(batch):
    function, x = TracedFunction(affine_by_hand), torch.ones(batch, 2, 3, dtype=F64)
    theta, weights = torch.zeros(batch, 0, dtype=F64), torch.ones(batch, 2, 2, dtype=F64)
    assert function.parameter_slope(x, theta, 2).shape == (batch, 2, 2, 0)
    assert function.parameter_contracted_hessian(x, theta, weights).shape == (batch, 0, 0)


@pytest.mark.parametrize("leading", [(), (4,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("name", CASES)
def test_a_plain_call_takes_any_leading_dimensions(name, leading):
    case, random = CASES[name], torch.Generator().manual_seed(1)
    x = torch.randn(*leading, case.dim, generator=random, dtype=F64)
    theta = torch.randn(*leading, case.parameters, generator=random, dtype=F64)
    ours = case.function(x, theta)
    assert ours.shape == (*leading, case.out)
    flat_x, flat_theta = x.reshape(math.prod(leading), -1), theta.reshape(math.prod(leading), case.parameters)
    one_by_one = [case.by_hand(a, b) for a, b in zip(flat_x, flat_theta, strict=True)]
    close(ours.reshape(-1, case.out), torch.stack(one_by_one), F64)


# --- analytic derivatives that are given ------------------------------------------------------------------------------
class Counted:
    """A function that counts how often it is called."""

    def __init__(self, function: Plain) -> None:
        self.function, self.calls = function, 0

    def __call__(self, x: Tensor, theta: Tensor) -> Tensor:
        self.calls += 1
        return self.function(x, theta)


def wave_jacobian(x: Tensor, theta: Tensor) -> Tensor:
    a, b, u, v = x[..., 0], x[..., 1], theta[..., 0], theta[..., 1]
    rows = [u * torch.cos(u * a) * b, torch.sin(u * a)], [torch.sin(v * b), v * torch.cos(v * b) * a]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def wave_parameter_jacobian(x: Tensor, theta: Tensor) -> Tensor:
    return (x * torch.cos(theta * x) * x.roll(1, -1)).diag_embed()


def hidden_wave(x: Tensor, theta: Tensor) -> Tensor:
    """The same values, but nothing to differentiate."""
    return wave(x.detach(), theta.detach())


def test_given_derivatives_are_used_and_right():
    jacobian, parameter_jacobian = Counted(wave_jacobian), Counted(wave_parameter_jacobian)
    function, inputs = TracedFunction(hidden_wave, jacobian, parameter_jacobian), make_inputs(1)
    x, theta, weights = inputs
    function.linearise(x, theta, 2)
    assert jacobian.calls > 0
    assert parameter_jacobian.calls == 0
    before = jacobian.calls
    function.contracted_hessian(x, theta, weights)
    assert jacobian.calls > before
    assert parameter_jacobian.calls == 0
    function.parameter_slope(x, theta, 2)
    assert parameter_jacobian.calls > 0
    before = parameter_jacobian.calls
    function.parameter_contracted_hessian(x, theta, weights)
    assert parameter_jacobian.calls > before
    agree(function, wave, *inputs)


def test_a_derivative_that_is_not_given_is_traced():
    x, theta, weights = make_inputs(2, rows=1)
    expected = expect(wave, x, theta, weights)
    one = TracedFunction(hide_state(wave), jacobian=wave_jacobian)
    close(one.linearise(x, theta, 1).slope, expected.slope, F64)
    close(one.parameter_slope(x, theta, 1), expected.parameter_slope, F64)
    other = TracedFunction(wave, parameter_jacobian=wave_parameter_jacobian)
    close(other.linearise(x, theta, 1).slope, expected.slope, F64)
    close(other.parameter_slope(x, theta, 1), expected.parameter_slope, F64)


def hide_state(plain: Plain) -> Plain:
    """The same values, and slopes in θ, but none in x."""
    return lambda x, theta: plain(x.detach(), theta)


def test_a_given_derivative_is_not_checked():
    """Twice the Jacobian is used as given."""
    x, theta, _ = make_inputs(4)
    function = TracedFunction(wave, jacobian=lambda x, theta: 2 * wave_jacobian(x, theta))
    expected = torch.stack([jacrev(wave)(a, b) for a, b in zip(x[:, 0], theta, strict=True)])
    close(function.linearise(x, theta, 1).slope[..., :2], 2 * expected, F64)


# --- traced once ------------------------------------------------------------------------------------------------------
def make_inputs(seed: int, batch: int = 4, rows: int = 2, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = (batch, 3, 2), (batch, 2), (batch, rows, 2)
    x, theta, weights = (torch.randn(shape, generator=random, dtype=F64).to(dtype) for shape in shapes)
    return x, theta, weights


def use_all(function: Function, x: Tensor, theta: Tensor, weights: Tensor) -> None:
    function.linearise(x, theta, weights.shape[1])
    function.contracted_hessian(x, theta, weights)
    function.parameter_slope(x, theta, weights.shape[1])
    function.parameter_contracted_hessian(x, theta, weights)


def test_a_function_is_traced_once_for_each_shape_and_keeps_no_values():
    """Traced at zero, then used elsewhere without a further call."""
    plain = Counted(wave)
    function = TracedFunction(plain)
    use_all(function, *(torch.zeros_like(v) for v in make_inputs(0, rows=1)))
    traced = plain.calls
    assert traced > 0
    for seed in range(1, 4):
        inputs = make_inputs(seed, rows=1)
        use_all(function, *inputs)
        assert plain.calls == traced
        agree(function, wave, *inputs)
        traced += 1  # by the plain call in `agree`
        assert plain.calls == traced


def test_another_shape_or_dtype_is_traced_again():
    plain = Counted(wave)
    function = TracedFunction(plain)

    def calls(rows: int, **kind) -> int:
        before = plain.calls
        function.linearise(*make_inputs(0, **kind)[:2], rows)
        return plain.calls - before

    assert calls(1) > 0
    assert calls(2) > 0
    assert calls(1, batch=1) > 0
    assert calls(1, dtype=F32) > 0
    assert calls(1) == calls(2) == calls(1, batch=1) == calls(1, dtype=F32) == 0


def test_a_trace_keeps_batch_elements_apart():
    """A change of one element changes only its result."""
    x, theta, _ = make_inputs(1)
    function = CASES["wave"].function
    before = function.linearise(x, theta, 2)
    other = x.clone()
    other[2] += 1.0
    after = function.linearise(other, theta, 2)
    for a, b in ((before.value, after.value), (before.slope, after.slope)):
        changed = (a != b).flatten(1).any(1)
        assert changed.tolist() == [False, False, True, False]


def test_a_trace_uses_the_present_weights_of_a_module():
    network = Network()
    function, random = TracedFunction(network), torch.Generator().manual_seed(5)
    x, theta, weights = (torch.randn(s, generator=random, dtype=F64) for s in ((4, 3, 3), (4, 2), (4, 2, 2)))
    before = function.linearise(x, theta, 2)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(-0.5).add_(0.1)
    expected, after = expect(network, x, theta, weights), function.linearise(x, theta, 2)
    assert not torch.allclose(before.slope, after.slope)
    close(after.value, expected.value, F64)
    close(after.slope, expected.slope, F64)


def test_results_of_a_trace_are_not_overwritten_by_the_next_use():
    function = CASES["wave"].function
    first = function.linearise(*make_inputs(1)[:2], 2)
    kept = [v.clone() for v in (first.value, first.slope)]
    function.linearise(*make_inputs(2)[:2], 2)
    for a, b in zip((first.value, first.slope), kept, strict=True):
        assert torch.equal(a, b)


def mixed(x: Tensor, theta: Tensor) -> Tensor:
    """Linear in one state, not at all in another, bent in the third: zeros of all kinds meet in its derivatives."""
    a, b, c = x[..., 0], x[..., 1] * 0 + 1, x[..., 2]
    linear = torch.stack([2 * a, a - b, b / 4, -a], -1)
    bent = torch.cat([torch.relu(c)[..., None], torch.nn.functional.softplus(x[..., 2:]) * theta[..., :1]], -1)
    both = torch.stack([a * c, torch.where(c > 0, a, c**2)], -1) @ torch.tensor([[1.0, 2.0], [0.0, 1.0]]).to(x)
    return torch.cat([linear, bent, both, both.sum(-1, keepdim=True).expand(*x.shape[:-1], 2)], -1)


def test_only_zero_terms_are_dropped_from_a_trace():
    random = torch.Generator().manual_seed(2)
    x, theta, weights = (torch.randn(s, generator=random, dtype=F64) for s in ((2, 3, 3), (2, 2), (2, 3, 10)))
    agree(TracedFunction(mixed), mixed, x, theta, weights)


def test_a_decoder_of_images():
    """Convolutions need exactly one batch dimension."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        layers = (nn.Linear(3, 8), nn.Unflatten(1, (2, 2, 2)), nn.ConvTranspose2d(2, 1, 2, 2), nn.ELU(), nn.Flatten())
        network = nn.Sequential(*layers).to(F64)
    random = torch.Generator().manual_seed(5)
    x, theta, weights = (torch.randn(s, generator=random, dtype=F64) for s in ((2, 2, 3), (2, 0), (2, 2, 16)))
    agree(
        TracedFunction(lambda x, theta: network(x)),
        lambda x, theta: network(x.reshape(-1, 3)).reshape(-1, 16)[0],
        x,
        theta,
        weights,
    )


def test_linearity_of_a_traced_function_is_detected():
    layer = nn.Linear(3, 40).to(F64)
    for plain in (lambda x, theta: layer(x), lambda x, theta: torch.cat([x[..., :2]] * 20, -1) - 1):
        function, x, theta = TracedFunction(plain), torch.randn(2, 3, 3, dtype=F64), torch.zeros(2, 0, dtype=F64)
        assert function.linearise(x, theta, 2).jacobian_derivative is None
        assert function.contracted_hessian(x, theta, torch.randn(2, 2, 40, dtype=F64)) is None


# --- slopes, formed where they are small and not formed where they are large ---
@pytest.mark.parametrize("coupled", [False, True], ids=["by channel", "coupled"])
@pytest.mark.parametrize("bent", [True, False], ids=["bent", "straight"])
@pytest.mark.parametrize(("rows", "orders", "out"), [(1, 2, 40), (2, 3, 30), (3, 3, 20), (3, 4, 2)])
def test_a_lazy_slope_equals_a_dense_one(rows, orders, out, bent, coupled):
    random, batch, dim = torch.Generator().manual_seed(3), 2, 3

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=F64)

    jacobian, derivative, weighted = draw(batch, out, dim), draw(batch, rows - 1, out, dim), draw(batch, rows, out)
    slope = torch.zeros(batch, rows, out, orders, dim, dtype=F64)
    for i in range(rows):
        slope[:, i, :, i] = jacobian
        if i and bent:
            slope[:, i, :, 0] = derivative[:, i - 1]
    slope = slope.view(batch, rows * out, orders * dim)
    root = draw(batch, rows, rows)
    temporal, log_channel, log_det = root @ root.mT + torch.eye(rows), draw(batch, out), draw(batch)
    factor = torch.eye(out) + draw(batch, out, out).tril(-1) / out
    matrix = factor.mT @ (log_channel.exp()[..., None] * factor) if coupled else torch.diag_embed(log_channel.exp())
    dense = torch.stack([torch.kron(t.contiguous(), m.contiguous()) for t, m in zip(temporal, matrix, strict=True)])
    precision = (
        CholeskyPrecision(temporal, log_channel, factor, log_det)
        if coupled
        else Precision(temporal, log_channel.exp(), log_det)
    )
    line = Linearisation(weighted, jacobian, derivative if bent else None, orders)
    torch.testing.assert_close(line.vjp(weighted), (weighted.flatten(1)[:, None] @ slope)[:, 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(line.quadratic_form(precision), slope.mT @ dense @ slope, rtol=1e-11, atol=1e-10)
    assert torch.equal(line.slope, slope)


# --- making functions -------------------------------------------------------------------------------------------------
def test_as_function():
    assert isinstance(as_function(None), Identity)
    assert as_function(lorenz) is lorenz
    assert isinstance(as_function(van_der_pol), TracedFunction)
    with pytest.raises(GraphError, match="must be a function of \\(state, parameters\\)"):
        as_function(3.0)  # type: ignore[arg-type]


def test_invalid_flows_are_rejected():
    with pytest.raises(SettingError, match="species must be 2 or more"):
        LotkaVolterra(1)
    with pytest.raises(SettingError, match="either matrix, or dim"):
        Linear()
    with pytest.raises(SettingError, match="either matrix, or dim"):
        Linear(SQUARE, dim=2)


def test_the_total_of_species_is_conserved():
    """With A antisymmetric and no growth, 1ᵀẋ = xᵀAx = 0."""
    random = torch.Generator().manual_seed(1)
    x, theta = torch.rand(7, 5, generator=random, dtype=F64), torch.randn(7, 10, generator=random, dtype=F64)
    np.testing.assert_allclose(LotkaVolterra(5)(x, theta).sum(-1).numpy(), 0, atol=1e-14)


# --- what closed forms keep ------------------------------------------------------------------------------------------
def test_a_wrong_number_of_parameters_is_rejected():
    with pytest.raises(GraphError, match="3 and 1 parameters, not 3 and 0"):
        lorenz(torch.ones(4, 3, dtype=F64), torch.zeros(4, 0, dtype=F64))
    with pytest.raises(GraphError, match="dimension 3"):
        lorenz(torch.ones(4, 2, dtype=F64), torch.zeros(4, 1, dtype=F64))


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("first_use", ["in a trace", "in a derivative"])
def test_the_first_use_of_a_closed_form_may_be_within_a_transform_of_torch(first_use, dtype):
    """As in a fresh process that begins with a flow of one's own that calls it; the Jacobian of Lorenz is by hand."""
    fresh = Lorenz()
    x, rho = torch.tensor([[1.0, -2.0, 3.0]], dtype=dtype), torch.tensor([[28.0]], dtype=dtype)
    expected = torch.tensor([[[-10.0, 10.0, 0.0], [25.0, -1.0, -1.0], [-2.0, 1.0, -8 / 3]]], dtype=dtype)
    for _ in range(2):
        if first_use == "in a trace":
            found = TracedFunction(fresh).linearise(x[:, None], rho, 1).jacobian
        else:
            found = torch.func.vmap(torch.func.jacfwd(fresh))(x, rho)
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(fresh.linearise(x[:, None], rho, 1).jacobian, expected)
    torch.testing.assert_close(fresh(x, rho), torch.tensor([[-30.0, 27.0, -10.0]], dtype=dtype))


def test_closed_forms_can_be_differentiated_after_a_run():
    """Caches from inference mode neither break autograd nor become stale."""
    x, theta = torch.rand(1, 2, 3, dtype=F64), torch.rand(1, 3, dtype=F64)
    with torch.inference_mode():
        inside = theta.clone()
        lotka_volterra.linearise(x, inside, 2)
    theta.requires_grad_()
    lotka_volterra.linearise(x, theta, 2).value.sum().backward()
    expected = lotka_volterra.parameter_slope(x, theta.detach(), 2).sum((1, 2))
    torch.testing.assert_close(theta.grad, expected)
    with torch.no_grad():
        before = lotka_volterra.linearise(x, theta, 2).value.clone()
        theta.mul_(2.0)
        torch.testing.assert_close(lotka_volterra.linearise(x, theta, 2).value, 2 * before)

"""Autocorrelation functions, against special functions in many digits and closed forms."""

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import special

import pcnet as pc
from pcnet.errors import GraphError, SettingError
from pcnet.model.digest import digest
from pcnet.model.model import Model
from pcnet.nodes import GeneralisedStateNode, PrecisionNode, SensoryNode
from pcnet.numerics.generalised import temporal_covariance, temporal_precision
from pcnet.numerics.kernels import Autocorrelation, Matern, SquaredExponential, White
from pcnet.sweeps.batching import batch_key, stack_models

HALVES = [0.5, 1.5, 2.5, 3.5, 4.5]
OTHERS = [0.3, 1.0, 2.2, 3.0, 7.7, 40.0]


# --- Matérn -----------------------------------------------------------------------------------------------------------
def matern(h, width, nu):
    """By the definition, with the modified Bessel function of mpmath."""
    z = mpmath.sqrt(2 * nu) * abs(h) / width
    return 2 ** (1 - mpmath.mpf(nu)) / mpmath.gamma(nu) * z**nu * mpmath.besselk(nu, z) if z else mpmath.mpf(1)


@pytest.mark.parametrize("nu", HALVES + OTHERS)
def test_matern_correlation_is_the_definition(nu):
    lags = np.array([0.0, 1e-3, 0.1, 0.5, 1.0, 3.0, 10.0])
    with mpmath.workdps(40):
        expected = np.array([float(matern(mpmath.mpf(h), mpmath.mpf("0.7"), mpmath.mpf(nu))) for h in lags])
    ours = Matern(lengthscale=0.7, smoothness=nu).correlation(torch.tensor(lags)).numpy()
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-12)


def test_matern_correlation_of_a_batch():
    width, nu = np.array([0.5, 1.0, 2.0]), np.array([1.5, 2.5, 3.5])
    ours = Matern(width, nu).correlation(torch.tensor(0.8, dtype=torch.float64))
    z = np.sqrt(2 * nu) * 0.8 / width
    expected = 2 ** (1 - nu) / special.gamma(nu) * z**nu * special.kv(nu, z)
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_matern_derivatives_are_those_of_its_closed_form(p):
    """ν = p + ½: κ = exp(−z) times a polynomial in z = √(2ν) h/w; its Taylor series to the right of zero, by mpmath."""
    with mpmath.workdps(60):
        root, width = mpmath.sqrt(2 * p + 1), mpmath.mpf("0.3")

        def closed(h):
            z = root * h / width
            terms = (
                mpmath.factorial(p + i) / (mpmath.factorial(i) * mpmath.factorial(p - i)) * (2 * z) ** (p - i)
                for i in range(p + 1)
            )
            return mpmath.exp(-z) * mpmath.factorial(p) / mpmath.factorial(2 * p) * sum(terms)

        series = mpmath.taylor(closed, 0, 2 * p + 1)
        expected = [float(c * mpmath.factorial(n)) for n, c in enumerate(series)]
    kernel = Matern(lengthscale=0.3, smoothness=p + 0.5)
    for n in range(2 * p + 1):
        scale = 0.3**-n
        assert kernel.derivative_at_zero(n).item() / scale == pytest.approx(expected[n] / scale, rel=1e-13, abs=1e-13)
    assert abs(expected[2 * p + 1]) > 1  # to the left it has the other sign: there is no such derivative
    assert kernel.derivative_at_zero(2 * p + 1).isnan()
    assert kernel.derivative_at_zero(2 * p + 2).isnan()


@pytest.mark.parametrize("nu", [1.0, 1.3, 2.0, 2.7, 3.6])
def test_matern_derivatives_are_moments_of_its_spectrum(nu):
    """κ^(2k)(0) = (−1)^k ∫ω^2k S(ω)dω with S ∝ (2ν/w² + ω²)^(−ν−½), by beta functions."""
    width = 0.8
    with mpmath.workdps(30):
        nu_, scale = mpmath.mpf(nu), 2 * mpmath.mpf(nu) / mpmath.mpf(width) ** 2
        moments = []
        for k in range(math.ceil(nu)):
            beta = mpmath.beta(k + mpmath.mpf(1) / 2, nu_ - k)  # ∫ω^2k (1 + ω²)^(−ν−½) dω
            moments.append(scale**k * beta / mpmath.beta(mpmath.mpf(1) / 2, nu_))
    kernel = Matern(width, nu)
    for k, moment in enumerate(moments):
        assert kernel.derivative_at_zero(2 * k).item() == pytest.approx((-1) ** k * float(moment), rel=1e-12)
        assert k == 0 or kernel.derivative_at_zero(2 * k - 1).item() == 0
    assert kernel.derivative_at_zero(2 * len(moments)).isnan()


def test_a_very_smooth_matern_is_a_squared_exponential():
    ours, limit = (temporal_precision(k, 4) for k in (Matern(0.5, 1e9), SquaredExponential(0.5)))
    torch.testing.assert_close(ours, limit, rtol=1e-6, atol=1e-9)
    lags = torch.linspace(0, 2, 5, dtype=torch.float64)
    torch.testing.assert_close(
        Matern(0.5, 1e4).correlation(lags), SquaredExponential(0.5).correlation(lags), rtol=0, atol=1e-3
    )


# --- a function of one's own ------------------------------------------------------------------------------------------
def lorentzian(h):
    return 1 / (1 + h**2)


def damped(h):
    return torch.exp(-(h**2) / 2) * torch.cos(2 * h)


@pytest.mark.parametrize("orders", [1, 2, 3, 4, 5])
def test_a_custom_function_has_the_derivatives_of_its_taylor_series(orders):
    """1/(1 + h²) = Σ(−1)^k h^2k; exp(−h²/2) against the closed form; a damped oscillation against mpmath."""
    width = 0.4
    series = [0.0 if n % 2 else (-1) ** (n // 2) * math.factorial(n) * width**-n for n in range(2 * orders - 1)]
    ours = Autocorrelation(lorentzian, width)
    for n, expected in enumerate(series):
        assert ours.derivative_at_zero(n).item() == pytest.approx(expected, rel=1e-12, abs=0)
    same = temporal_covariance(Autocorrelation(lambda h: torch.exp(-0.5 * h**2), width), orders)
    torch.testing.assert_close(same, temporal_covariance(SquaredExponential(width), orders), rtol=1e-12, atol=0)
    with mpmath.workdps(40):
        taylor = mpmath.taylor(lambda h: mpmath.exp(-(h**2) / 2) * mpmath.cos(2 * h), 0, 2 * orders - 2)
        expected = [float(c * mpmath.factorial(n)) for n, c in enumerate(taylor)]
    for n in range(0, 2 * orders - 1, 2):
        assert Autocorrelation(damped).derivative_at_zero(n).item() == pytest.approx(expected[n], rel=1e-12)


def test_derivatives_are_computed_once():
    calls = []

    def counted(h):
        calls.append(h.shape)
        return torch.exp(-(h**2))

    kernel = Autocorrelation(counted)
    temporal_precision(kernel, 3)
    before = len(calls)
    for _ in range(5):
        temporal_precision(kernel, 3)
    assert len(calls) == before


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda h: 2 * torch.exp(-(h**2)), ["is 2 at lag 0"]),
        (lambda h: torch.exp(-((h - 0.1) ** 2) + 0.01), ["not even"]),
        (lambda h: torch.sin(h) / h, ["nan at lag 0"]),
        (lambda h: torch.sqrt(1 - h**2), ["not finite at lag"]),
        (lambda h: h.sum(), ["must turn lags", "()"]),
        (lambda h: 1.0, ["must turn lags", "float"]),
        (lambda h: h.nonsense(), ["failed on a tensor of lags", "nonsense"]),
    ],
)
def test_invalid_autocorrelations_are_rejected(function, words):
    with pytest.raises(SettingError) as caught:
        Autocorrelation(function)
    assert all(word in str(caught.value) for word in words)


# --- refusals when the graph is checked -------------------------------------------------------------------------------
def decay(x, theta):
    return -x


def graph(kernel, orders=3):
    x = GeneralisedStateNode("x", dim=1, orders=orders, flow=decay)
    y = SensoryNode("y", dim=1, orders=1)
    made = pc.Graph()
    made.predicts(x, y)
    made.weighs(PrecisionNode("noise_x", prior_precision=4.0, sd=0.1, kernel=kernel), x)
    made.weighs(PrecisionNode("noise_y", prior_precision=4.0, sd=0.1, kernel=Matern(0.1, 0.5)), y)
    return made


def rough(h):
    """Matérn 3/2: κ''(0) = −3, but autograd of |h| at zero knows nothing of it."""
    z = math.sqrt(3) * h.abs()
    return (1 + z) * torch.exp(-z)


def kinked(h):
    """Its third derivative jumps at zero, where autograd finds a nice zero: two orders, not three."""
    return torch.exp(-(h**2) / 2 + h.abs() ** 3)  # not bounded, but nobody looks so far


@pytest.mark.parametrize(
    ("kernel", "orders", "words"),
    [
        (Matern(0.1, 1.5), 3, ["noise_x", "'x'", "smoothness 1.5", "2 orders of motion, not 3"]),
        (Matern(0.1, 0.5), 2, ["1 order of motion, not 2"]),
        (Matern(0.1, 2.0), 3, ["2 orders of motion, not 3"]),
        (Matern(0.1, [3.5, 2.5]), 4, ["3 orders of motion, not 4"]),
        (Autocorrelation(rough), 2, ["noise_x", "rough", "1 order of motion, not 2"]),
        (Autocorrelation(torch.cos, 0.1), 3, ["2 orders of motion, not 3", "not positive definite"]),
        (Autocorrelation(torch.ones_like), 2, ["1 order of motion, not 2"]),
        (Autocorrelation(lambda h: 2 - torch.exp(-(h**2))), 2, ["1 order of motion, not 2"]),
        (SquaredExponential(1e-60), 4, ["3 orders of motion, not 4", "finite"]),
    ],
)
def test_too_many_orders_are_rejected_when_the_graph_is_checked(kernel, orders, words):
    with pytest.raises(GraphError) as caught:
        graph(kernel, orders).check()
    assert all(word in str(caught.value) for word in words), caught.value
    with pytest.raises(GraphError):
        graph(kernel, orders).start()
    possible = int(next(word for word in words if "of motion" in word)[0])
    graph(kernel, possible).run(torch.zeros(3, 1), schedule=pc.states_only())


def test_a_jump_of_an_odd_derivative_limits_the_orders():
    kernel = Autocorrelation(lambda h: kinked(h.clamp(-0.5, 0.5)))
    assert kernel.derivative_at_zero(2).item() == pytest.approx(-1)
    assert kernel.derivative_at_zero(3).isnan()


# --- in runs ----------------------------------------------------------------------------------------------------------
WIDTHS = torch.tensor([0.2, 0.4, 0.9], dtype=torch.float64)


@pytest.mark.parametrize(
    "kernel",
    [lambda width: Matern(width, 3.5), lambda width: Matern(0.3, 2 + 3 * width), lambda w: Autocorrelation(damped, w)],
    ids=["matern", "matern of many smoothnesses", "own"],
)
def test_a_batch_of_kernels_equals_single_ones(kernel):
    observations = torch.linspace(0, 3, 12, dtype=torch.float64)[:, None].sin()
    batch = graph(kernel(WIDTHS), orders=2).run(observations, schedule=pc.odem(every=4))
    models = [Model(graph(kernel(width), orders=2), pc.odem(every=4)) for width in WIDTHS]
    assert len({batch_key(model) for model in models}) == 1
    assert len({digest(model) for model in models}) == 3
    stacked = stack_models(models)
    swept = stacked.graph.run(observations, schedule=stacked.schedule)
    for i, model in enumerate(models):
        alone = model.graph.run(observations, schedule=model.schedule)
        for found in (batch, swept):
            np.testing.assert_allclose(found.mean("x")[i], alone.mean("x"), rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(found.free_action[i], alone.free_action, rtol=1e-10)


def test_models_with_different_kernel_functions_have_different_forms():
    one, other = (Model(graph(Autocorrelation(f), orders=2), pc.odem()) for f in (damped, lorentzian))
    assert batch_key(one) != batch_key(other)
    assert digest(one) != digest(other)
    assert "0x" not in repr(one.graph["noise_x"])


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (SquaredExponential(0.7), 0.7 * math.sqrt(2 * math.pi)),
        (Matern(0.7, 0.5), 1.4),  # exp(−|h|/w)
        (Matern(0.7, 1.5), 4 * 0.7 / math.sqrt(3)),  # (1 + z)e^−z, z = √3|h|/w
        (Autocorrelation(lambda h: 1 / (1 + h**2) ** 2, 0.7), 0.7 * math.pi / 2),
        (White(), 0.0),
    ],
)
def test_correlation_integrals(kernel, expected):
    assert kernel.correlation_integral.item() == pytest.approx(expected, rel=1e-6, abs=1e-12)

"""Agreement with SPM's elementary functions, measured under GNU Octave (see data/README.md)."""

import math

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.numerics.generalised import shift_matrix, taylor_embedding, temporal_covariance, temporal_precision
from pcnet.numerics.kernels import Kernel, SquaredExponential
from pcnet.numerics.matrix_exponential import exponential_step
from pcnet.settings import Positive, settings
from support.paths import DATA

SMOOTHNESS = np.load(DATA / "spm_smoothness.npz")
EMBEDDING = np.load(DATA / "spm_embedding.npz")
STEPS = np.load(DATA / "spm_local_linearisation.npz")
EPS = np.finfo(float).eps


# --- smooth noise: spm_DEM_R ------------------------------------------------------------------------------------------
def gaussian(s: float) -> SquaredExponential:
    """SPM's exp(−t²/4s²) as exp(−t²/2w²); s = 0 stands for e⁻⁸."""
    return SquaredExponential(lengthscale=math.sqrt(2) * (s or math.exp(-8)))


@settings
class Lorentzian(Kernel):
    """κ(h) = 1/(1 + h²/x²), the autocorrelation of SPM's form '1/f', with x = 8s²."""

    x: Positive

    def derivative_at_zero(self, n: int) -> Tensor:
        return self.x * 0.0 if n % 2 else (-1) ** (n // 2) * math.factorial(n) * self.x**-n

    def correlation(self, h: Tensor) -> Tensor:
        return 1 / (1 + (h / self.x) ** 2)


def standardised(matrix: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """A matrix graded over many powers of s, with its grading taken out."""
    return matrix * np.outer(sd, sd)


FORMS = [("", gaussian, SMOOTHNESS["s"]), ("1f", lambda s: Lorentzian(x=8 * s**2), SMOOTHNESS["s"][1:])]


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize(("form", "kernel", "widths"), FORMS, ids=["gaussian", "1/f"])
def test_smooth_noise(form, kernel, widths, n):
    for i, s in enumerate(widths):
        v, r = SMOOTHNESS[f"V{form}_n{n}"][i], SMOOTHNESS[f"R{form}_n{n}"][i]
        sd = np.sqrt(np.diag(v))
        ours = temporal_covariance(kernel(float(s)), n).numpy()
        np.testing.assert_allclose(standardised(ours, 1 / sd), standardised(v, 1 / sd), rtol=0, atol=1e-14)
        ours, theirs = standardised(temporal_precision(kernel(float(s)), n).numpy(), sd), standardised(r, sd)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12 * np.abs(theirs).max())


def test_smooth_noise_of_many_lengthscales_at_once():
    widths = SMOOTHNESS["s"][1:]
    together = temporal_precision(SquaredExponential(lengthscale=math.sqrt(2) * widths), 5)
    for precision, s, r in zip(together, widths, SMOOTHNESS["R_n5"][1:], strict=True):
        sd = np.sqrt(np.diag(SMOOTHNESS["V_n5"][1:][list(widths).index(s)]))
        scale = np.abs(standardised(r, sd)).max()
        np.testing.assert_allclose(standardised(precision.numpy(), sd), standardised(r, sd), rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("ridge", [1e-6, 0.5])
def test_ridge_is_relative_to_the_mean_variance(ridge):
    """SPM has no ridge: S + ridge · mean(diag S) I inverted with 50 digits."""
    v = SMOOTHNESS["V_n4"][3]
    with mpmath.workdps(50):
        ridged = mpmath.matrix(v.tolist()) + mpmath.mpf(ridge) * mpmath.mpf(np.trace(v) / 4) * mpmath.eye(4)
        expected = np.array((ridged**-1).tolist(), dtype=float)
    ours = temporal_precision(gaussian(float(SMOOTHNESS["s"][3])), 4, ridge=ridge).numpy()
    np.testing.assert_allclose(ours, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("n", range(1, 9))
def test_derivative_operator(n):
    np.testing.assert_array_equal(shift_matrix(n, 1).numpy(), SMOOTHNESS[f"D_n{n}"])
    np.testing.assert_array_equal(shift_matrix(n, 3).numpy(), np.kron(SMOOTHNESS[f"D_n{n}"], np.eye(3)))


# --- embedding: spm_DEM_embed -----------------------------------------------------------------------------------------
def embedding_tolerance(n: int, dt: float) -> float:
    """SPM inverts the Taylor matrix with dt in it, which for small dt and many orders costs it digits."""
    return 1e-11 if dt >= 0.5 else 1e-14 * (1 / dt) ** n


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("series", ["cubic", "sin2", "walk", "white3"])
def test_embedding(series, n):
    samples = EMBEDDING[f"Y_{series}"].T
    scale = np.abs(samples).max()
    for dt, of_dt in zip(EMBEDDING["dt"], EMBEDDING[f"E_{series}_n{n}"], strict=True):
        for t, expected in zip(EMBEDDING["t"], of_dt, strict=True):
            ours = taylor_embedding(torch.tensor(samples), n, float(t) - 1, float(dt)).numpy()
            per_bin = dt ** np.arange(n)[:, None]
            tolerance = embedding_tolerance(n, dt) * scale
            np.testing.assert_allclose(
                ours * per_bin, expected * per_bin, rtol=0, atol=tolerance, err_msg=f"{t=} {dt=}"
            )


@pytest.mark.parametrize("n", range(1, 9))
def test_embedding_of_delayed_channels(n):
    """A delay moves the time of one channel back, also to before the first sample."""
    samples = torch.tensor(EMBEDDING["Y_white3"].T)
    for t, expected in zip(EMBEDDING["t"], EMBEDDING[f"Edelay_white3_n{n}"], strict=True):
        for channel, delay in enumerate(EMBEDDING["delays"]):
            ours = taylor_embedding(samples[:, [channel]], n, float(t - delay) - 1)[:, 0].numpy()
            np.testing.assert_allclose(ours, expected[:, channel], rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("at", [6.0, 7.5, 9.25])
@pytest.mark.parametrize("orders", range(1, 7))
def test_embedding_is_exact_for_polynomials(orders, at, dtype):
    """Through `orders` samples of a polynomial of lower degree there is one Taylor series: its own."""
    dt, time = 0.25, np.arange(16) * 0.25
    polynomials = [np.polynomial.Polynomial([1.0, -2.0, 0.5, 0.3, -0.1, 0.02][:orders]) for _ in range(2)]
    polynomials[1] = polynomials[1] * -0.5
    samples = torch.tensor(np.stack([p(time) for p in polynomials], -1), dtype=dtype).expand(3, 16, 2)
    expected = np.array([[p.deriv(i)(at * dt) if i else p(at * dt) for p in polynomials] for i in range(orders)])
    ours = taylor_embedding(samples, orders, at, dt)
    assert ours.shape == (3, orders, 2)
    assert ours.dtype == dtype
    scale = samples.abs().max().item() * (2 / dt) ** np.arange(orders)[:, None]
    for one in ours.numpy():
        assert (np.abs(one - expected) / scale).max() < 40 * torch.finfo(dtype).eps


def test_embedding_needs_samples():
    with pytest.raises(SettingError, match="5 orders needs at least 5 samples; there are 4"):
        taylor_embedding(torch.zeros(4, 1, dtype=torch.float64), 5, 0.0)


# --- local linearisation: spm_dx --------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 20])
def test_local_linearisation(n):
    """All cases of one size as one batch, to within what rounding of J itself does: a few ‖Jt‖ eps."""
    j, f, t, dx = (STEPS[f"{key}_n{n}"] for key in ("J", "f", "t", "dx"))
    kept = np.isfinite(t).all(-1)
    j, f, t, dx = j[kept], f[kept], t[kept], dx[kept]
    assert len(j) >= 43
    single = (t == t[:, :1]).all(-1)  # one time for all coordinates; else diag(t)J moves for a unit of time
    time = np.where(single, t[:, 0], 1.0)
    speed = np.where(single[:, None], 1.0, t)
    ours = exponential_step(*map(torch.tensor, (speed[..., None] * j, speed * f, time))).numpy()
    size = np.abs(t[..., None] * j).sum(-1).max(-1)
    deviation = np.abs(ours - dx).max(-1) / np.abs(dx).max(-1)
    assert (deviation < 1e-13 + 4 * EPS * size).all()


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 20])
def test_local_linearisation_for_infinite_time(n):
    """t = ∞ of a stable flow equals any long enough time; rotations are left out."""
    j, f, t, dx = (STEPS[f"{key}_n{n}"] for key in ("J", "f", "t", "dx"))
    slowest = np.linalg.eigvals(j).real.max(-1)
    kept = np.isinf(t).all(-1) & (slowest < -1e-3)
    assert kept.sum() >= 2
    time = -40 / slowest[kept]
    ours = exponential_step(torch.tensor(j[kept]), torch.tensor(f[kept]), torch.tensor(time)).numpy()
    rest = -np.linalg.solve(j[kept], f[kept][..., None])[..., 0]
    deviation = np.abs(ours - rest).max(-1) / np.abs(rest).max(-1)
    assert (deviation < 1e-13 + 4 * EPS * np.linalg.cond(j[kept])).all()
    deviation = np.abs(ours - dx[kept]).max(-1) / np.abs(dx[kept]).max(-1)
    assert (deviation < 1e-7).all()  # SPM's own pseudo-inverse is that far from −J⁻¹f

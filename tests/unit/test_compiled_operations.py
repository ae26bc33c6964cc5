"""Each operation that compiled code can do, compared with torch: as scalars and as loops, alone and side by side."""

import math

import pytest
import torch

from pcnet.engine.compiled import elementwise_rules
from pcnet.engine.compiled.loop_algebra import WRITERS
from pcnet.engine.compiled.loop_code import FOLDS as LOOP_FOLDS
from pcnet.engine.compiled.loop_code import MOVES as LOOP_MOVES
from pcnet.engine.compiled.scalar_rules import RULES
from pcnet.numerics.branching import needed
from pcnet.numerics.symmetric import mirrored
from support.compiled import evaluate, expected

FORMS = [("scalars", 1), ("scalars", 4), ("loops", 1), ("loops", 4)]
EDGES = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    math.nan,
    math.inf,
    -math.inf,
    5e-324,
    -2.3e-308,
    1e308,
    -1e308,
    0.5,
    2.0,
    1e-20,
    709.9,
    -745.5,
]


def numbers(*shape, seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(4, *shape, generator=draw, dtype=torch.float64).to(dtype)


def edges(turn=0, dtype=torch.float64):
    values = torch.tensor(EDGES[turn:] + EDGES[:turn], dtype=torch.float64).to(dtype)
    return values.reshape(4, 4)


def positive(n, seed=0):
    a = numbers(n, n, seed=seed)
    return a @ a.mT + 0.1 * torch.eye(n, dtype=a.dtype)


ONE = {
    "neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt,
    "square": torch.square, "reciprocal": torch.reciprocal, "floor": torch.floor, "ceil": torch.ceil,
    "trunc": torch.trunc, "round": torch.round, "sin": torch.sin, "cos": torch.cos, "tan": torch.tan,
    "asin": torch.asin, "acos": torch.acos, "atan": torch.atan, "sinh": torch.sinh, "cosh": torch.cosh,
    "tanh": torch.tanh, "expm1": torch.expm1, "log1p": torch.log1p, "erf": torch.erf, "erfc": torch.erfc,
    "lgamma": torch.lgamma, "sigmoid": torch.sigmoid, "rsqrt": torch.rsqrt, "isfinite": torch.isfinite,
    "isnan": torch.isnan, "isinf": torch.isinf, "relu": torch.relu, "softplus": torch.nn.functional.softplus,
    "silu": torch.nn.functional.silu, "pow2": lambda x: x**2, "pow3": lambda x: x**3, "pow-1": lambda x: x**-1,
    "pow0.5": lambda x: x**0.5, "pow1.7": lambda x: x**1.7, "base": lambda x: 0.875**x, "plus": lambda x: x + 2,
    "times": lambda x: x * 3, "from": lambda x: 1 - x, "over": lambda x: x / 3, "under": lambda x: 2 / x,
    "asinh": torch.asinh, "acosh": torch.acosh, "atanh": torch.atanh, "exp2": torch.exp2, "log2": torch.log2,
    "log10": torch.log10, "signbit": torch.signbit,
    "clamp": lambda x: x.clamp(-0.5, 1.0), "clamp_min": lambda x: x.clamp_min(0.25),
    "alpha": lambda x: torch.add(x, x, alpha=3),
    "nan_to_num": lambda x: torch.nan_to_num(x, nan=2.0, posinf=3.0, neginf=-4.0), "float": lambda x: x.float(),
    "bool": lambda x: x != 0, "not": lambda x: ~(x > 0), "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
}  # fmt: skip
TWO = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "pow": torch.pow, "maximum": torch.maximum,
    "minimum": torch.minimum, "xlogy": torch.xlogy, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "eq": torch.eq, "ne": torch.ne, "and": lambda a, b: (a > 0) & (b > 0), "or": lambda a, b: (a > 0) | (b > 0),
    "xor": lambda a, b: (a > 0) ^ (b > 0), "where": lambda a, b: torch.where(a > b, a, b),
    "atan2": torch.atan2, "hypot": torch.hypot, "fmod": torch.fmod, "fmax": torch.fmax, "fmin": torch.fmin,
    "lerp": lambda a, b: torch.lerp(a, b, torch.tensor(0.3, dtype=a.dtype)), "copysign": torch.copysign,
    "bools": lambda a, b: (a > 0) * (b > 0),
}  # fmt: skip


def agree(function, inputs, form, width, rtol=1e-13, atol=0.0):
    inputs = [value[:width] for value in inputs]
    found, wanted = evaluate(function, inputs, form, width), expected(function, inputs)
    assert found is not None
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype or not other.dtype.is_floating_point
        torch.testing.assert_close(one.to(other.dtype), other, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize(
    ("form", "width", "dtype"),
    [("scalars", 1, torch.float64), ("scalars", 4, torch.float32), ("loops", 4, torch.float64)],
)
@pytest.mark.parametrize("name", ONE)
def test_functions_of_one_number(name, form, width, dtype):
    """On random numbers and on edge values: NaN, infinities, denormals, and arguments near overflow."""
    rtol = 2e-12 if name in ("lgamma", "tan", "erfc", "pow1.7", "base") else 1e-13
    rtol = rtol if dtype is torch.float64 and name != "float" else 1e-6
    both = torch.cat([numbers(5), edges()], 1).to(dtype)
    agree(ONE[name], [both], form, width, rtol, 1e-320 if dtype is torch.float64 else 1e-38)


@pytest.mark.parametrize(("form", "width"), FORMS)
@pytest.mark.parametrize("name", TWO)
def test_functions_of_two_numbers(name, form, width):
    for turn in (0, 3, 5) if form == "scalars" else (7,):
        one, other = torch.cat([numbers(3), edges()], 1), torch.cat([numbers(3, seed=1), edges(turn)], 1)
        agree(TWO[name], [one, other], form, width, 1e-13)
    agree(TWO[name], [numbers(3, 2), numbers(2, seed=1)], form, width)


LATER = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64)[:, None, None]


def _sparse_products(a, b):
    """Products with matrices that are zero in places, before and after more is written to them."""
    found, c = [], a.new_zeros(1, 3, 9)
    found.append(c @ a)
    c[..., 1:6:2] = torch.diag_embed(b)
    found += [c @ a, a @ c.mT, torch.baddbmm(a[:, :3], c[..., :3], a[:, :3])]
    c[:, 0, 8] += b[:, 0]
    moved = torch.cat([c[..., 4:], -2 * c[..., :4]], -1)
    found += [c @ a, (moved * moved.sum(1, keepdim=True)) @ a @ moved.mT]
    return tuple(found)


MOVES = {
    "cat": lambda x: torch.cat([x, x[:, :1], x], 1),
    "stack": lambda x: torch.stack([x, x * 2], -1),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 2, 0, -1), value=7.0),
    "roll": lambda x: torch.roll(x, (1, 2), (1, 2)),
    "flip": lambda x: torch.flip(x, (1,)),
    "repeat": lambda x: x.repeat(1, 2, 2),
    "transpose": lambda x: x.mT.contiguous() + 0.0,
    "diag_embed": torch.diag_embed,
    "diagonal": lambda x: x.diagonal(dim1=-2, dim2=-1) * 1.0,
    "tril": lambda x: torch.tril(x, -1),
    "triu": torch.triu,
    "index": lambda x: x[:, torch.tensor([2, 0, 0]), torch.tensor([1, 2, 0])],
    "index_select": lambda x: torch.index_select(x, 1, torch.tensor([2, 1])),
    "unbind": lambda x: x.unbind(1)[1] * 1.0,
    "write a slice": lambda x: _written(x, None),
    "write by index": lambda x: _written(x, torch.tensor([0, 2])),
    "expand": lambda x: x[:, :, None].expand(-1, -1, 2, -1).reshape(1, -1),
}


def _written(x, index):
    made = x.new_zeros(x.shape)
    if index is None:
        made[:, 1:] = x[:, :-1]
        made[:, 0, 0] += 5.0
        made.mul_(2.0)
    else:
        made[:, index] = x[:, :2]
    return made


@pytest.mark.parametrize(("form", "width"), FORMS)
@pytest.mark.parametrize("name", MOVES)
def test_operations_that_move_elements(name, form, width):
    agree(MOVES[name], [numbers(3, 3)], form, width, 0.0)


FOLDS = {
    "sum": lambda x: x.sum((1, 2)), "sum of one dimension": lambda x: x.sum(1, keepdim=True),
    "mean": lambda x: x.mean(-1),
    "var": lambda x: x.var(-1),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "prod": lambda x: x.prod(1), "amax": lambda x: x.amax(-1), "amin": lambda x: x.amin((1, 2)),
    "all": lambda x: (x > -5).all(-1), "any": lambda x: (x > 1).any(1), "cumsum": lambda x: x.cumsum(1),
    "cumsum of integers": lambda x: (3 * x).long().cumsum(1), "cumsum of truths": lambda x: (x > 0).cumsum(-1),
    "softmax": lambda x: torch.softmax(x, -1), "logsumexp": lambda x: torch.logsumexp(x, -1),
    "norm": lambda x: x.norm(dim=-1), "geometric mean": lambda x: x.abs().log().mean((1, 2)).exp(),
    "exponential of a logarithm": lambda x: x.abs().log().exp(),
}  # fmt: skip


@pytest.mark.parametrize(("form", "width"), FORMS)
@pytest.mark.parametrize("name", FOLDS)
def test_reductions(name, form, width):
    agree(FOLDS[name], [numbers(3, 5)], form, width, 1e-13)


def _rebuilt(a):
    values, vectors = torch.linalg.eigh(a)
    return (vectors * values.exp()[:, None]) @ vectors.mT


WEIGHTS = numbers(3, 5)[0]


def _squares_around_a_change(a):
    before, again = a @ a, a @ a
    a[:, 1] += 2
    return before, again, a @ a


def _changed_copies(a):
    """A copy that is changed while its source is still used, and one whose source is not."""
    first = a + 1
    second = first.clone()
    second[:, 2:] *= 3
    third = second.clone()
    third[..., 1] += first[..., 2]
    return third.clone().mul_(2), first


MATRICES = {
    "bmm": (lambda a, b: a @ b.mT, [numbers(4, 3), numbers(5, 3, seed=1)]),
    "einsum": (lambda a, b: torch.einsum("bij,bj->bi", a, b), [numbers(4, 3), numbers(3, seed=1)]),
    "wide bmm": (lambda a, b: a @ b, [numbers(7, 9), numbers(9, 31, seed=1)]),
    "narrow bmm": (lambda a, b: a @ b, [numbers(9, 21), numbers(21, 3, seed=1)]),
    "shared bmm": (lambda a, b: a[:, None] @ b, [numbers(5, 14), numbers(3, 14, 14, seed=1)]),
    "mirrored": (mirrored, [numbers(3, 5, 5)]),
    "mirrored sum": (lambda a: (mirrored(a + 1), a), [numbers(6, 6)]),
    "mirrored product": (
        lambda a, b, c: mirrored(torch.baddbmm(a, b, c)),
        [numbers(29, 29), numbers(29, 3, seed=1), numbers(3, 29, seed=2)],
    ),
    "mirrored and scaled": (
        lambda a, s: mirrored(2 * a) * s + mirrored(3 * a).exp(),
        [numbers(3, 5, 5), numbers(3, 1, 1, seed=1)],
    ),
    "mirrored and read twice": (lambda a, s: (found := mirrored(2 * a)) * s + found.mT, [numbers(5, 5), numbers(1, 1)]),
    "mirrored and scaled by rows": (lambda a, s: mirrored(2 * a) * s, [numbers(5, 5), numbers(5, 1, seed=1)]),
    "products of zeros": (_sparse_products, [numbers(9, 9), numbers(3, seed=1)]),
    "product of what was zero once": (lambda a, b: a @ b, [numbers(3, 3) * LATER, numbers(3, 3, seed=1)]),
    "product and its mirror": (lambda a, b: (mirrored(found := a @ b), found), [numbers(9, 9), numbers(9, 9, seed=1)]),
    "the same twice": (lambda a: (a @ a).add_(a @ a) - (a @ a), [numbers(6, 6)]),
    "the same of changed numbers": (lambda a: _squares_around_a_change(a + 1), [numbers(6, 6)]),
    "copies": (_changed_copies, [numbers(6, 6)]),
    "baddbmm": (torch.baddbmm, [numbers(4, 5), numbers(4, 3, seed=1), numbers(3, 5, seed=2)]),
    "linear": (lambda x: torch.nn.functional.linear(x, WEIGHTS, WEIGHTS[:, 0]), [numbers(5, seed=1)]),
    "cholesky": (lambda a: torch.linalg.cholesky_ex(a)[0], [positive(4)]),
    "cholesky_inverse": (lambda a: torch.cholesky_inverse(torch.linalg.cholesky_ex(a)[0]), [positive(5)]),
    "cholesky_solve": (
        lambda a, b: torch.cholesky_solve(b, torch.linalg.cholesky_ex(a)[0]), [positive(5), numbers(5, 2, seed=1)]
    ),
    "triangular": (
        lambda a, b: torch.linalg.solve_triangular(a.tril(), b, upper=False), [positive(4), numbers(4, 2, seed=1)]
    ),
    "upper triangular": (
        lambda a, b: torch.linalg.solve_triangular(a.triu(), b, upper=True), [positive(4), numbers(4, 2, seed=1)]
    ),
    "solve": (lambda a, b: torch.linalg.solve_ex(a, b)[0], [numbers(5, 5), numbers(5, 3, seed=1)]),
    "solve with zeros on the diagonal": (
        lambda a, b: torch.linalg.solve_ex(a - torch.diag_embed(a.diagonal(dim1=-2, dim2=-1)), b)[0],
        [numbers(4, 4, seed=3), numbers(4, 1, seed=1)],
    ),
    "inverse": (lambda a: torch.linalg.inv_ex(a)[0], [numbers(4, 4)]),
    "slogdet": (lambda a: tuple(torch.linalg.slogdet(a)), [numbers(4, 4)]),
    "det": (torch.linalg.det, [numbers(3, 3)]),
    "eigenvalues": (torch.linalg.eigvalsh, [positive(5) - 1.5 * torch.eye(5, dtype=torch.float64)]),
    "eigenvectors": (_rebuilt, [positive(6)]),
}  # fmt: skip


@pytest.mark.parametrize(("form", "width"), FORMS)
@pytest.mark.parametrize("name", MATRICES)
def test_linear_algebra(name, form, width):
    function, inputs = MATRICES[name]
    agree(function, inputs, form, width, 1e-11, 1e-12)


@pytest.mark.parametrize(("form", "width"), FORMS)
@pytest.mark.parametrize("n", [1, 3, 4, 9])
def test_the_exponential_step(n, form, width):
    """Against the exponential of the augmented matrix; elements side by side differ in size by 10⁶."""
    from pcnet.numerics.matrix_exponential import exponential_step

    jacobian, flow = numbers(n, n), numbers(n, seed=1)
    times = torch.tensor([1e-3, 0.5, 30.0, 1000.0], dtype=torch.float64) / (1 + n)
    scales = (-jacobian @ jacobian.mT)[:width] if n > 1 else -jacobian[:width].abs()
    found = evaluate(exponential_step, [scales, flow[:width], times[:width]], form, width)
    assert found is not None
    for i in range(width):
        augmented = torch.zeros(n + 1, n + 1, dtype=torch.float64)
        augmented[:n, :n], augmented[:n, n] = scales[i] * times[i], flow[i] * times[i]
        wanted = torch.linalg.matrix_exp(augmented)[:n, n]
        torch.testing.assert_close(found[0][i], wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", ["scalars", "loops"])
def test_elements_side_by_side_have_the_digits_of_elements_alone(form):
    """Also where they take different pivots."""

    def function(a, b):
        return torch.linalg.solve_ex(a, b)[0].exp(), torch.linalg.eigh(a @ a.mT)[0].log(), a.sum((1, 2)) / 3

    inputs = [numbers(4, 4), numbers(4, 2, seed=1)]
    together = evaluate(function, inputs, form, 4)
    for i in range(4):
        alone = evaluate(function, [value[i : i + 1] for value in inputs], form, 1)
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one[i], other[0])


@pytest.mark.parametrize(("form", "width"), FORMS)
def test_a_branch_is_a_guard(form, width):
    """Recorded on positive numbers, a program that branches on the sign does not run on others."""

    def function(x):
        return x.exp() if bool((x > 0).all()) else x

    good = numbers(3).abs() + 0.1
    agree(function, [good], form, width)
    bad = good.clone()
    bad[width - 1, 1] = -1.0
    if width > 1:
        assert evaluate(function, [bad[:width]], form, width) is None


@pytest.mark.parametrize(("form", "width"), FORMS)
def test_a_matrix_at_the_edge_of_positive_definiteness_is_a_guard(form, width):
    def function(a):
        factor, info = torch.linalg.cholesky_ex(a)
        return factor * 2 if not bool(info.any()) else a

    edge = positive(3)
    assert evaluate(function, [edge[:width]], form, width) is not None
    edge[width - 1] = torch.ones(3, 3)
    if width > 1:
        assert evaluate(function, [edge[:width]], form, width) is None


@pytest.mark.parametrize(("form", "width"), FORMS)
def test_a_matrix_of_zeros_is_not_positive_definite(form, width):
    def function(a):
        factor, info = torch.linalg.cholesky_ex(a)
        return factor if not bool(info.any()) else a + 1.0

    agree(function, [torch.zeros(4, 3, 3, dtype=torch.float64)], form, width)


@pytest.mark.parametrize(("form", "width"), FORMS)
def test_a_matrix_with_nan_is_not_positive_definite(form, width):
    """As LAPACK says."""

    def function(a):
        factor, info = torch.linalg.cholesky_ex(a)
        return a[..., 0] + 1.0 if bool(info.any()) else factor[..., 0]

    broken = positive(3)
    broken[:, 1, 1] = torch.nan
    agree(function, [broken], form, width)


def test_each_operation_with_a_rule_is_known_by_its_form():
    """A reduction that counted as elementwise would be wrong in loops; what has no loop is named here."""
    forms = [set(elementwise_rules.RULES), set(WRITERS), set(LOOP_FOLDS), set(LOOP_MOVES)]
    for i, one in enumerate(forms):
        assert not any(one & other for other in forms[:i])
    left = RULES.keys() - set().union(*forms)
    assert left == {"guard", "mv", "dot", "addmv", "addbmm", "contiguous", "_unsafe_view"}


@pytest.mark.parametrize("form", ["scalars", "loops"])
def test_code_that_does_what_is_not_needed_serves_lanes_that_differ(form):
    """|x| by a branch on negative x: code with it is right for all lanes, code without it refuses negative ones."""

    def size(x):
        return torch.where(x < 0, -x, x) if needed((x < 0).any()) else 1.0 * x

    x = torch.tensor([[-2.0], [3.0], [-4.0], [0.5]], dtype=torch.float64)
    (found,) = evaluate(size, [x], form, width=4)
    assert torch.equal(torch.as_tensor(found), x.abs())
    assert evaluate(size, [x.flip(0)], form, width=4) is None
    (found,) = evaluate(size, [x.abs()], form, width=4)
    assert torch.equal(torch.as_tensor(found), x.abs())

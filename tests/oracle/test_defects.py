"""Defects that were found and fixed; each test failed before its fix."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.errors import GraphError
from pcnet.functions import check
from pcnet.functions.traced import TracedFunction, as_function
from support.filters import single_filter

LIKE = torch.zeros(0, dtype=torch.float64)


@pytest.fixture
def default_dtype():
    """Lets a test set the default dtype of torch, and restores it."""
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("numbers", [(2, 2.0), (2.0, 2)])
def test_a_flow_may_hold_the_same_number_as_an_integer_and_as_a_float(numbers):
    one, other = numbers

    def flow(x, theta):
        return torch.stack([x[..., 0] / one * (x[..., 0] / other), torch.tanh(x[..., 0] / other)], -1)

    x = torch.tensor([[[0.3, 0.1], [0.2, 0.4]]], dtype=torch.float64)
    theta = torch.zeros(1, 0, dtype=torch.float64)
    linearised = TracedFunction(flow).linearise(x, theta, 2)
    torch.testing.assert_close(linearised.value[:, 0], flow(x[:, 0], theta), rtol=0, atol=0)
    expected = torch.autograd.functional.jacobian(lambda v: flow(v, theta[0]), x[0, 0])
    torch.testing.assert_close(linearised.jacobian[0], expected)


def test_a_flow_may_hold_zeros_of_both_signs():
    flow = TracedFunction(lambda x, theta: torch.cat([torch.tanh(x / 0.0), torch.tanh(x / -0.0)], -1))
    value = flow.linearise(torch.ones(1, 1, 1, dtype=torch.float64), torch.zeros(1, 0, dtype=torch.float64), 1).value
    assert value.tolist() == [[[1.0, -1.0]]]


@pytest.mark.parametrize(
    "options", [{}, {"noise_per_channel": True, "model_error_time": 1.0}, {"correlation_time": 0.05}], ids=str
)
def test_an_adaptive_filter_does_not_depend_on_the_default_dtype(default_dtype, options):
    y = 1 + 0.02 * np.random.default_rng(0).normal(size=(40, 3)).cumsum(0)
    found = []
    for dtype in (torch.float32, torch.float64):
        default_dtype(dtype)
        graph, schedule = single_filter(
            pc.systems.lotka_volterra, 3, 0.01, parameter_mean=[0.3, -0.2, 0.3], parameter_sd=0.25, **options
        )
        run = graph.start(schedule)
        run.run(y)
        found.append([run.mean(name) for name in graph.nodes if "mean" in graph.nodes[name].quantities])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("flow", "dim", "parameters"),
    [
        (lambda x, theta: torch.eye(3, dtype=x.dtype) @ x, 3, 0),
        (lambda x, theta: torch.stack([x[1], x[2], x[0]]), 3, 0),
        (lambda x, theta: theta @ x, 2, 3),
    ],
)
def test_a_flow_that_is_not_batched_is_refused_whatever_its_dimensions(flow, dim, parameters):
    with pytest.raises(GraphError, match="the flow of 'x'"):
        check.check_function("the flow of 'x'", as_function(flow), dim, parameters, dim, LIKE)


def test_graphs_may_be_built_in_several_threads():
    script = """
        import threading
        import torch
        from pcnet.functions.traced import TracedFunction

        def work(k):
            flow = TracedFunction(lambda x, theta: torch.stack([x[..., 1], -k * torch.sin(x[..., 0])], -1))
            flow.linearise(torch.ones(1, 3, 2, dtype=torch.float64), torch.zeros(1, 0, dtype=torch.float64), 3)
            found.append(k)

        found = []
        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(sorted(found))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[0, 1, 2, 3]", done.stderr


def test_the_number_of_outputs_of_a_mapping_is_found_by_calling_it():
    assert check.output_size(as_function(lambda x, theta: torch.cat([x, 2 * x], -1)), 3, 0) == 6
    assert check.output_size(as_function(lambda x, theta: x[..., :1] * theta), 3, 1) == 1
    assert check.output_size(as_function(None), 4, 0) == 4
    with pytest.raises(GraphError, match="the mapping must turn"):
        check.output_size(as_function(lambda x, theta: x[0]), 3, 0, "the mapping")


def test_growth_rates_given_as_a_list_are_kept_in_double_precision():
    flow = pc.systems.LotkaVolterra(2, growth=[0.1, -0.3])
    assert flow.coefficients[0, 0, 1, 0].item() == 0.05

"""The promises every kind of node keeps; the test class of a kind inherits them and says how to build a graph."""

from __future__ import annotations

import math

import pytest
import torch

import pcnet as pc
from pcnet.model.context import NodeContext
from pcnet.model.messages import BlockPosterior, Error
from pcnet.model.node import BatchSpec
from pcnet.numerics.trees import flatten


class NodeContract:
    """Subclass, and give `build(batch)`: a graph with the node `name`, whose settings differ between batch elements,
    and `observations` (time, …) for it."""

    name: str
    schedule = pc.odem(every=3)

    def build(self, scale: torch.Tensor) -> pc.Graph:
        """A graph whose settings depend on `scale`, a tensor of any batch shape or a single number."""
        raise NotImplementedError

    def observations(self) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    scales = torch.tensor([0.7, 1.0, 1.6], dtype=torch.float64)

    def session(self, scale=None, steps=4, **options):
        graph = self.build(self.scales if scale is None else scale)
        session = graph.start(self.schedule, record=(), **options)
        for t in range(steps):
            session.step({name: y[t] for name, y in self.observations().items()})
        return session

    def run(self, scale, **options):
        graph = self.build(scale)
        wanted = {q for node in graph.nodes.values() for q in node.quantities} | {"energy"}
        some = {name: y[:12] for name, y in self.observations().items()}
        return graph.run(some, schedule=self.schedule, record=wanted, **options)

    # --- the promises ----------------------------------------------------------------------------------------------
    def test_role_and_name(self):
        node = self.build(self.scales)[self.name]
        assert node.role
        assert node.name == self.name
        assert self.name in node.title

    def test_settings_are_immutable_and_unknown_ones_refused(self):
        node = self.build(self.scales)[self.name]
        with pytest.raises(AttributeError):
            node.name = "other"
        with pytest.raises(pc.errors.SettingError, match="unknown setting 'nonsense'"):
            type(node)("n", nonsense=1)

    def test_beliefs_and_energies_have_one_leading_batch_dimension(self):
        session = self.session()
        node, local = session.graph[self.name], session.context(self.name)
        for path, part in flatten(local.state, self.name).items():
            assert part.shape[0] == len(self.scales), path
        for part in node.energy(local):
            assert part is None or part.shape == (len(self.scales),)

    def test_quantities_are_labelled_and_finite(self):
        session = self.session()
        node = session.graph[self.name]
        assert node.quantities
        for quantity, about in node.quantities.items():
            value = session.read(self.name, quantity)
            assert value.dim() == 1 + len(about.dims), quantity
            assert torch.isfinite(value).all(), quantity

    def test_messages_are_immutable_and_repeatable(self):
        """The same belief and messages give the same message, and asking changes nothing."""
        session = self.session()
        node, local = session.graph[self.name], session.context(self.name)
        before = local.state
        with torch.inference_mode():
            for links, send in ((local.below, node.prediction), (local.above, node.error)):
                for link in links:
                    first, second = send(local, link), send(local, link)
                    if isinstance(first, BlockPosterior):
                        parts = [(first.mean, second.mean), (first.covariance, second.covariance)]
                        with pytest.raises(AttributeError):
                            first.mean = None
                    elif not isinstance(first, Error):
                        parts = zip(_flat(first.value), _flat(second.value), strict=True)
                        with pytest.raises(AttributeError):
                            first.value = None
                    else:
                        parts = [(first.weighted, second.weighted)]
                        with pytest.raises(AttributeError):
                            first.weighted = None
                    assert all(torch.equal(a, b) for a, b in parts)
        assert local.state is before

    def test_actions_change_only_the_own_state_and_only_where_due(self):
        session = self.session()
        context = session.context(self.name)
        others = {name: session.context(name).state for name in session.graph.nodes if name != self.name}
        mask = torch.tensor([True, False, True])
        with torch.inference_mode():
            for action in (
                "accumulate",
                "update",
                "update_covariance",
                "predict",
                "retune",
                "renew_prior",
                "initialise",
            ):
                context.observation = next(iter(self.observations().values()))[0].expand(3, -1)
                before = context.state
                session._run.space.take(action, [self.name], mask)
                after = context.state
                for (path, old), (_, new) in zip(flatten(before, "").items(), flatten(after, "").items(), strict=True):
                    assert torch.equal(old[1].nan_to_num(), new[1].nan_to_num()), f"{action} changed {path}"
        assert all(session.state.nodes[name] is state for name, state in others.items())
        assert all(session._run.space.contexts[name].state is state for name, state in others.items())

    def test_sees_its_own_links_only(self):
        session = self.session()
        local: NodeContext = session.context(self.name)
        for link in local.above:
            assert link.child.name == self.name
        for link in local.below:
            assert link.parent.name == self.name

    def test_gradient_is_the_slope_of_the_free_energy(self):
        """Central differences of the sum of all nodes' energies, posterior log-determinants held."""
        session = self.session(scale=torch.tensor(1.0, dtype=torch.float64))
        node, local = session.graph[self.name], session.context(self.name)
        with torch.inference_mode():
            gradient = node.gradient(local)
            if gradient is None:
                pytest.skip("this kind has no mean of its own to move")
            state = local.state
            for i in range(gradient.shape[1]):
                sides = []
                for sign in (1, -1):
                    mean = state.mean.clone()
                    h = 1e-5 * max(1.0, abs(mean.reshape(-1)[i].item()))
                    mean.view(-1)[i] += sign * h
                    local.propose(state._replace(mean=mean))
                    sides.append(_free_energy(session))
                expected = (sides[0] - sides[1]) / (2 * h)
                assert gradient[0, i].item() == pytest.approx(expected, rel=2e-4, abs=2e-4)
            local.propose(state)

    def test_batch_element_equals_the_run_alone(self):
        together = self.run(self.scales)
        for i, scale in enumerate(self.scales):
            alone = self.run(scale)
            for key, trace in together.traces.items():
                node, _, quantity = key.partition(".")
                # eigenvalues that were lifted to 1e-9 leave few digits of a covariance: how many depends on the machine
                regularised = quantity in ("sd", "covariance") and bool(alone.fallbacks.get(node, 0))
                expected = torch.as_tensor(alone.traces[key].values)
                atol = 1e-6 * float(expected.abs().max()) if regularised else 1e-10
                torch.testing.assert_close(torch.as_tensor(trace.values[i]), expected, rtol=1e-10, atol=atol)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_dtype_is_that_of_the_run(self, dtype):
        session = self.session(dtype=dtype)
        for path, part in flatten(session.context(self.name).state, self.name).items():
            assert part.dtype == dtype or path.endswith("/time"), path

    def test_begin_does_not_depend_on_global_defaults(self):
        start = BatchSpec(1, torch.float64, torch.device("cpu"), torch.Size([]))
        assert start.expand(torch.tensor(1.0), 0).dtype == torch.float64
        default = torch.get_default_dtype()
        expected = self.run(self.scales)
        try:
            torch.set_default_dtype(torch.float64 if default == torch.float32 else torch.float32)
            found = self.run(self.scales)
        finally:
            torch.set_default_dtype(default)
        for key, trace in expected.traces.items():
            torch.testing.assert_close(
                torch.as_tensor(found.traces[key].values), torch.as_tensor(trace.values), rtol=0, atol=0
            )


def _flat(value) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [value.temporal, value.channel, value.log_det]


def _free_energy(session) -> float:
    total = 0.0
    for name, node in session.graph.nodes.items():
        accuracy, complexity = node.energy(session._run.space.contexts[name])
        total += (0 if complexity is None else complexity.item()) - (0 if accuracy is None else accuracy.item())
    assert math.isfinite(total)
    return total

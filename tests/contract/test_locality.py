"""The update of a node depends on its own state and the messages on its own links, and on nothing else."""

import torch

import pcnet as pc
from pcnet.numerics.trees import flatten, tree_map
from support.models import build


def started(**options):
    model = build(dims=(2, 2), orders=(3, 3), channels=(2, 2), **options)
    session = model.graph.start(pc.odem(every=100), record=())
    for t in range(3):
        session.step({name: y[t] for name, y in model.observations.items()})
    return session


def after(session, name, action, disturbed):
    """Whether an action of `name` gives the same state when the states of other nodes are disturbed."""
    states, outcomes = session.state.nodes, []
    with torch.inference_mode():
        for disturb in (False, True):
            changed = dict(states)
            for other in disturbed if disturb else ():
                parts = {field: moved(part) for field, part in states[other]._asdict().items() if field != "seen"}
                changed[other] = states[other]._replace(**parts)  # how many orders are seen is a count
            session.replace_nodes(changed)
            outcomes.append(getattr(session.graph[name], action)(session.context(name)))
            session.replace_nodes(states)
    pairs = zip(*(flatten(outcome, name).items() for outcome in outcomes), strict=True)
    return all(torch.equal(a, b) for (_, a), (_, b) in pairs)


def moved(part):
    return tree_map(moved, part) if isinstance(part, tuple) else part * 1.7 + 0.3


def test_another_branch_does_not_affect_a_state():
    session = started()
    other_branch = [name for name in session.graph.nodes if name.endswith("1") and name != "theta01"]
    assert "x1" in other_branch
    assert after(session, "x0", "update", other_branch)


def test_sensory_states_do_not_affect_parameters_of_a_flow_within_a_tick():
    session = started()
    assert after(session, "theta00", "accumulate", ["y0", "noise_y0", "x1"])


def test_a_precision_depends_on_its_own_error_only():
    session = started()
    assert after(session, "noise_x0", "accumulate", ["y0", "noise_y0", "x1", "noise_x1"])
    assert after(session, "noise_y0", "accumulate", ["noise_x0", "x1", "y1"])


def test_neighbours_do_affect_a_node():
    """The same disturbance of a neighbour has an effect, so the tests above can fail."""
    session = started()
    for name, action, neighbour in (
        ("x0", "update", "y0"),
        ("x0", "update", "noise_x0"),
        ("x0", "update", "theta00"),
        ("theta00", "accumulate", "x0"),
        ("noise_y0", "accumulate", "y0"),
    ):
        assert not after(session, name, action, [neighbour]), (name, neighbour)


def test_messages_reach_a_node_on_its_own_links_only():
    session = started()
    for name in session.graph.nodes:
        context = session.context(name)
        own = {link for link in session.graph.links if name in (link.parent.name, link.child.name)}
        assert set(context.above) | set(context.below) == own

"""Summaries of graphs for drawings: kinds, levels, clocks and positions."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from student_t import StudentTSensoryNode

import pcnet as pc
from pcnet.errors import ResultError
from pcnet.graphs import odem
from pcnet.results.graph_summary import STACK_SPACING, WIDEST, GraphSummary
from support.recorded import stack, stack_run


def test_kinds_levels_and_clocks_of_a_stack():
    structure = GraphSummary.of(stack(2), pc.odem(every=10, periods={"a": 7}))
    seen = {node.name: (node.kind, node.level, node.clock) for node in structure.nodes}
    assert seen == {
        "y": ("sensory", 0, ""),
        "precision of y": ("precision", 0, "every 10"),
        "x1": ("state", 1, ""),
        "v1": ("cause", 1, ""),
        "a": ("parameter", 1, "every 7"),
        "b": ("parameter", 1, "every 10"),
        "precision of x1": ("precision", 1, "every 10"),
        "precision of v1": ("precision", 1, "every 10"),
        "x2": ("state", 2, ""),
        "v2": ("cause", 2, ""),
        "precision of x2": ("precision", 2, "every 10"),
        "precision of v2": ("precision", 2, "every 10"),
        "u": ("input", 3, ""),
    }


def test_nodes_without_updates_are_fixed_and_batched_clocks_are_ranges():
    graph, _ = odem()
    assert GraphSummary.of(graph, pc.states_only())["theta"].clock == "fixed"
    assert GraphSummary.of(graph, pc.odem(every=[8, 64]))["theta"].clock == "every 8 to 64"
    assert GraphSummary.of(graph)["theta"].clock == ""


def test_a_custom_kind_is_shown_as_the_kind_it_derives_from():
    assert StudentTSensoryNode("y", dim=1, orders=1).kind == "sensory"


def test_a_summary_survives_a_round_trip_as_text():
    structure = GraphSummary.of(stack(3), pc.odem())
    assert GraphSummary.from_json(structure.to_json()) == structure
    with pytest.raises(ResultError, match="damaged"):
        GraphSummary.from_json('{"nodes": [["x"]], "links": []}')
    with pytest.raises(ResultError, match=r"no node 'z'; nodes: x1, y"):
        _ = structure["z"]


def test_messages_have_the_names_under_which_they_are_recorded():
    result = stack_run()
    for link in result.structure.links:
        for way in ("prediction", "error"):
            assert link.channel(way) in result.traces


@settings(max_examples=40)
@given(
    heads=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    guests=st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["parametrises", "weighs", "drives"])), max_size=14),
)
def test_positions_are_distinct_and_parents_are_never_below_children(heads, guests):
    """Random forests of nodes."""
    from pcnet.results.graph_summary import LinkSummary, NodeSummary

    names = [f"h{i}" for i in range(len(heads))]
    levels = dict(zip(names, sorted(heads), strict=True))
    links = []
    for i, (host, kind) in enumerate(guests):
        other = names[host % len(names)]
        names.append(f"g{i}")
        levels[f"g{i}"] = levels[other]
        links.append(LinkSummary(kind, f"g{i}", other, None))
    structure = GraphSummary(tuple(NodeSummary(n, "state", "state", levels[n], "", "") for n in names), tuple(links))
    places = structure.layout
    assert set(places) == set(names)
    for a, b in itertools.combinations(names, 2):
        near = abs(places[a].column - places[b].column) < 0.99 and abs(places[a].row - places[b].row) < 0.64
        assert not near, (a, b, places[a], places[b])
        if levels[a] < levels[b]:
            assert places[a].row < places[b].row
    assert structure.layout == places


@pytest.mark.parametrize("parts", [1, 15])
def test_a_wide_graph_is_drawn_in_several_rows(parts):
    """Thirty sensors below one state, or two below each of fifteen: no more columns than fit on a screen."""
    graph = pc.Graph()
    for i in range(parts):
        x = pc.GeneralisedStateNode(f"x{i}", dim=1, orders=1, flow=lambda x, _: -x)
        graph.weighs(pc.PrecisionNode(f"noise_x{i}", prior_precision=1.0, sd=1.0, correlation_time=0.1), x)
        for j in range(30 // parts):
            graph.predicts(x, pc.SensoryNode(f"y{i}{j}", dim=1, orders=1, dt=0.1))
    structure = GraphSummary.of(graph)
    positions = structure.layout
    columns = [position.column for position in positions.values()]
    assert max(columns) - min(columns) + 1 <= WIDEST
    assert min(columns) + max(columns) == pytest.approx(0, abs=1.5)
    assert all(
        abs(a.column - b.column) >= 1 or abs(a.row - b.row) >= STACK_SPACING
        for a, b in itertools.combinations(positions.values(), 2)
    )
    for link in structure.links:
        if link.kind == "predicts":
            assert positions[link.parent].row > positions[link.child].row

"""Studies: tables, selection, model comparison and averages, against numbers worked out by hand."""

import json
import math
import random
import sqlite3

import numpy as np
import pandas as pd
import pytest

import pcnet as pc
from pcnet.errors import StudyError
from pcnet.graphs import odem
from pcnet.sweeps.evaluate import Outcome
from pcnet.sweeps.store import FORMAT, Planned, Store, to_json
from pcnet.sweeps.study import Study

WORLD = pc.simulate.glv_process(samples=12, noise="white", seed=3)


def data(orders=2, dt=0.01):
    return json.dumps({"y": {"orders": orders, "channels": 3, "dt": dt, "start": "first"}})


def made(rows, path=None):
    """A study with these inversions: (settings, replicate, data, free action or None if diverged, belief of theta)."""
    store = Store(path, create=True)
    planned = [Planned(to_json(settings), replicate, "mark", seen) for settings, replicate, seen, _, _ in rows]
    store.plan([planned])
    outcomes = []
    for _, _, _, free_action, belief in rows:
        lost = free_action is None
        beliefs = {} if lost or belief is None else {"theta": {"mean": list(belief[0]), "sd": list(belief[1])}}
        outcomes.append(
            Outcome(
                math.nan if lost else free_action,
                math.nan if lost else 1.0,
                math.nan if lost else 1.0 + free_action,
                5 if lost else None,
                "x" if lost else None,
                {} if lost else {"x": {"mse": abs(free_action), "coverage": 0.5}},
                beliefs,
                {"x": 0},
                0.1,
            )
        )
    (ids,) = [[number for number, _, _ in batch] for batch in store.open_batches().values()]
    store.finish(ids, outcomes)
    return Study(store)


def plain(rows, **options):
    return made([(settings, 0, data(), free_action, None) for settings, free_action in rows], **options)


FOUR = [({"a": 1, "b": "p"}, 10.0), ({"a": 1, "b": "q"}, 11.0), ({"a": 2, "b": "p"}, 12.5), ({"a": 2, "b": "q"}, 10.5)]


# --- looking -----------------------------------------------------------------------------------------------------
def test_the_table_holds_all_outcomes():
    belief = ([1.0, 2.0], [0.1, 0.2])
    study = made([({"a": 1}, 0, data(), 3.0, belief), ({"a": [1, [2]], "b": None}, 1, data(), None, None)])
    table = study.to_dataframe()
    first, second = table.iloc[0], table.iloc[1]
    assert (first["a"], first["replicate"], first["status"], first["free_action"]) == (1, 0, "done", 3.0)
    assert (first["accuracy"], first["complexity"], first["x.mse"], first["x.coverage"]) == (1.0, 4.0, 3.0, 0.5)
    assert first[["theta.mean[0]", "theta.mean[1]", "theta.sd[0]", "theta.sd[1]"]].tolist() == [1.0, 2.0, 0.1, 0.2]
    assert (second["a"], second["status"], second["diverged_at"], second["diverged_node"]) == (
        (1, (2,)),
        "diverged",
        5,
        "x",
    )
    assert second[["free_action", "accuracy", "complexity", "x.mse", "theta.mean[0]"]].isna().all()
    assert study.counts == {"open": 0, "done": 1, "diverged": 1, "failed": 0}
    assert "1 done" in repr(study)
    assert "in memory" in repr(study)


def test_where_selects_by_value_by_list_and_by_list_valued_settings():
    study = made([({"a": a}, 0, data(), float(i), None) for i, a in enumerate([1, 2, 3, [1, 2], [2, 3]])])

    def found(value):
        return study.to_dataframe(where={"a": value})["free_action"].tolist()

    assert found(2) == [1.0]
    assert found([1, 3]) == [0.0, 2.0]
    assert found({1, 3}) == [0.0, 2.0]
    assert found(np.array([1, 3])) == [0.0, 2.0]
    assert found([2, 3]) == [1.0, 2.0, 4.0]  # the values 2 and 3, and the setting that is this list
    with pytest.raises(StudyError, match="no inversion has a = 7"):
        found(7)
    with pytest.raises(StudyError, match="there is no column 'c'; columns: a, "):
        study.to_dataframe(where={"c": 1})


def test_best():
    study = plain(FOUR)
    assert study.best()["free_action"].tolist() == [10.0]
    assert study.best(by="a")["free_action"].tolist() == [10.0, 10.5]
    assert study.best(by=["b"])["free_action"].tolist() == [10.0, 10.5]
    assert study.best(by=["a", "b"])["free_action"].tolist() == [10.0, 11.0, 12.5, 10.5]
    assert study.best(where={"b": "q"})["free_action"].tolist() == [10.5]
    assert study.best(by="a", score="x.mse").index.tolist() == study.best(by="a").index.tolist()
    with pytest.raises(StudyError, match="no column 'c'"):
        study.best(by="c")
    with pytest.raises(StudyError, match=r"no column 'z\.mse'"):
        study.best(score="z.mse")


def test_best_leaves_out_diverged_models():
    study = plain([({"a": 1}, None), ({"a": 2}, 3.0), ({"a": 3}, 2.0)])
    assert study.best()["a"].tolist() == [3]
    assert study.best(by="a")["a"].tolist() == [2, 3]
    with pytest.raises(StudyError, match="all of them diverged"):
        study.best(where={"a": 1})


# --- comparing ---------------------------------------------------------------------------------------------------
def test_probabilities_by_hand():
    table = plain(FOUR).probabilities()
    joint = np.exp([-0.0, -1.0, -2.5, -0.5])
    expected = joint / joint.sum()
    assert table[["a", "b"]].to_numpy().tolist() == [[1, "p"], [2, "q"], [1, "q"], [2, "p"]]
    np.testing.assert_allclose(table["probability"], expected[[0, 3, 1, 2]], rtol=1e-12)
    prior = np.array([1.0, 0.0, 5.0, 2.0])  # in the order of the table
    found = plain(FOUR).probabilities(prior=prior).sort_index()["probability"]
    np.testing.assert_allclose(found, prior * joint / (prior @ joint), rtol=1e-12)


def test_replicates_add_up():
    """Independent data: log evidences of a model add, so F = 3 + 4 against 5 + 1, though each wins one replicate."""
    rows = [({"a": a}, r, data(), f, None) for r, fs in enumerate(((3.0, 5.0), (4.0, 1.0))) for a, f in enumerate(fs)]
    table = made(rows).probabilities().set_index("a")
    assert table["free_action"].to_dict() == {0: 7.0, 1: 6.0}
    assert table["probability"][1] == pytest.approx(1 / (1 + math.exp(-1)), rel=1e-12)


def test_a_model_that_diverged_for_one_replicate_is_excluded():
    rows = [({"a": 0}, 0, data(), 1.0, None), ({"a": 1}, 0, data(), 9.0, None)]
    rows += [({"a": 0}, 1, data(), None, None), ({"a": 1}, 1, data(), 9.0, None)]
    assert made(rows).probabilities().set_index("a")["probability"].to_dict() == {0: 0.0, 1: 1.0}


def test_models_without_all_replicates_are_not_compared():
    study = made([({"a": 0}, 0, data(), 1.0, None), ({"a": 0}, 1, data(), 1.0, None), ({"a": 1}, 0, data(), 1.0, None)])
    with pytest.raises(StudyError, match="not been inverted for all replicates"):
        study.probabilities()
    assert len(study.probabilities(where={"replicate": 0})) == 2


def test_families_by_hand():
    """Three models against one, and one of the three lost: the mean evidence of each family."""
    study = plain([({"a": 1, "b": 1}, 2.0), ({"a": 1, "b": 2}, None), ({"a": 1, "b": 3}, 4.0), ({"a": 2, "b": 1}, 3.0)])
    table = study.compare("a")
    evidence = {1: (math.exp(-2) + math.exp(-4)) / 3, 2: math.exp(-3)}
    for a, value in evidence.items():
        assert table["log_evidence"][a] == pytest.approx(math.log(value), rel=1e-12)
        assert table["probability"][a] == pytest.approx(value / sum(evidence.values()), rel=1e-12)
    assert table["models"].to_dict() == {1: 3, 2: 1}
    assert table["lowest_free_action"].to_dict() == {1: 2.0, 2: 3.0}
    assert table.index.tolist() == sorted(evidence, key=evidence.get, reverse=True)
    with pytest.raises(StudyError, match="no setting 'c'; settings: a, b"):
        study.compare("c")


def test_list_valued_settings_can_be_compared():
    study = plain([({"a": [1.0, 2.0]}, 1.0), ({"a": [3.0, 4.0]}, 1.0 + math.log(3))])
    assert study.probabilities()["probability"].tolist() == pytest.approx([0.75, 0.25], rel=1e-12)
    assert study.compare("a")["probability"][(1.0, 2.0)] == pytest.approx(0.75, rel=1e-12)
    assert study.best(by="a")["a"].tolist() == [(1.0, 2.0), (3.0, 4.0)]


def test_average_by_hand():
    """Evidences 1 : 3, so the mixture is ¼ N(0, 1) + ¾ N(4, 2²); diverged models have no weight."""
    rows = [({"a": 1}, 0, data(), 5.0 + math.log(3), ([0.0], [1.0])), ({"a": 2}, 0, data(), 5.0, ([4.0], [2.0]))]
    study = made([*rows, ({"a": 3}, 0, data(), None, None)])
    found = study.average("theta")
    np.testing.assert_allclose(found.mean, [3.0], rtol=1e-12)
    np.testing.assert_allclose(found.sd, [2.5], rtol=1e-12)
    tilted = study.average("theta", prior=[3.0, 1.0, 7.0])  # even odds
    np.testing.assert_allclose(tilted.mean, [2.0], rtol=1e-12)
    np.testing.assert_allclose(tilted.sd, [math.sqrt(2.5 + 4.0)], rtol=1e-12)
    assert study.average("theta", where={"a": 2}).mean.tolist() == [4.0]
    with pytest.raises(StudyError, match="no belief of 'z'"):
        study.average("z")


def test_beliefs_of_different_dimensions_are_not_averaged():
    rows = [({"a": 1}, 0, data(), 5.0, ([0.0], [1.0])), ({"a": 2}, 0, data(), 5.0, ([4.0, 1.0], [2.0, 1.0]))]
    with pytest.raises(StudyError, match="not the same dimensions"):
        made(rows).average("theta")
    assert made(rows).average("theta", where={"a": 1}).mean.tolist() == [0.0]


WAYS = [
    lambda study: study.best(),
    lambda study: study.best(by="a"),
    lambda study: study.probabilities(),
    lambda study: study.compare("a"),
    lambda study: study.average("theta"),
]


@pytest.mark.parametrize("ask", WAYS)
def test_models_of_different_orders_are_not_compared(ask):
    """Rejected with the reason and a remedy, which works."""
    belief = ([0.0], [1.0])
    rows = [({"a": 1, "k": k}, 0, data(orders=k - 1), float(k), belief) for k in (2, 3)]
    study = made(rows)
    with pytest.raises(StudyError) as caught:
        ask(study)
    text = str(caught.value)
    assert "'y' has orders 1 and 2" in text
    assert "other orders of motion" in text
    assert "cannot be compared" in text
    assert "where={'k': 2}" in text
    assert "by=[…, 'k']" in text
    assert study.best(where={"k": 2})["free_action"].tolist() == [2.0]
    assert study.best(by=["a", "k"])["free_action"].tolist() == [2.0, 3.0]
    assert study.probabilities(where={"k": 2})["probability"].tolist() == [1.0]
    assert study.best(score="x.mse")["k"].tolist() == [2]  # errors to the truth compare across data


def test_models_of_different_sampling_intervals_are_not_compared():
    study = made([({"dt": dt}, 0, data(dt=dt), 1.0, None) for dt in (0.01, 0.02)])
    with pytest.raises(StudyError, match=r"'y' has dt 0\.01 and 0\.02.*where=\{'dt': 0\.01\}"):
        study.probabilities()


def test_models_with_different_sensory_nodes_are_not_compared():
    study = made([({"a": 1}, 0, data(), 1.0, None), ({"a": 2}, 0, json.dumps({"z": {"orders": 2}}), 1.0, None)])
    with pytest.raises(StudyError, match="'y' is observed in one and not in the other"):
        study.compare("a")


@pytest.mark.parametrize("ask", [WAYS[0], WAYS[1], WAYS[4]])
def test_different_replicates_are_not_compared(ask):
    study = made([({"a": 1}, r, data(), 1.0, ([0.0], [1.0])) for r in (0, 1)])
    with pytest.raises(StudyError, match=r"replicates.*where=\{'replicate': 0\}"):
        ask(study)
    assert len(study.best(by=["replicate"])) == 2


@pytest.mark.parametrize("ask", WAYS[2:])
def test_unfinished_models_prevent_a_comparison(ask):
    """A model that might still be the best must not count as impossible."""
    study = plain(FOUR)
    study._store.plan([[Planned(to_json({"a": 3, "b": "p"}), 0, "mark", data())]])
    with pytest.raises(StudyError, match=r"1 inversions are still open.*'done', 'diverged'"):
        ask(study)
    found = study.probabilities(where={"status": ["done", "diverged"]})["probability"]
    assert found.sum() == pytest.approx(1.0)
    assert study.best()["free_action"].tolist() == [10.0]


# --- files -------------------------------------------------------------------------------------------------------
def refused(path, words):
    with pytest.raises(StudyError, match=words):
        Study.open(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(StudyError, match=words):
        pc.sweep(odem, {"kappa": [1.0]}, WORLD.observations, path, processes=1)
    assert before is None or path.read_bytes() == before


def test_files_that_are_not_studies_are_rejected(tmp_path):
    text, other, folder, cut = (tmp_path / name for name in ("notes.txt", "other.db", "folder", "cut.db"))
    text.write_text("These are my notes, and they must not be touched.\n" * 200)
    refused(text, "is not a study, or it is damaged")
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE mine (a)")
    connection.close()
    refused(other, "is not a study of pcnet")
    folder.mkdir()
    refused(folder, "folder")
    plain([({"a": i}, 1.0) for i in range(500)], path=cut)._store.close()
    assert cut.stat().st_size > 20_000
    cut.write_bytes(cut.read_bytes()[:10_000])
    with pytest.raises(StudyError, match="damaged"):
        Study.open(cut).to_dataframe()
    with pytest.raises(StudyError, match="there is no study"):
        Study.open(tmp_path / "nothing.db")
    assert not (tmp_path / "nothing.db").exists()
    empty = tmp_path / "empty.db"
    empty.touch()
    with pytest.raises(StudyError, match="not a study of pcnet"):
        Study.open(empty)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("UPDATE inversions SET free_action = free_action + 1e-9 WHERE id = 2", "inversion 2 has a wrong checksum"),
        ("UPDATE inversions SET settings = replace(settings, '1', '3')", "wrong checksum"),
        ("DELETE FROM inversions WHERE id = 4", "rows are missing"),
        ("UPDATE about SET value = 'x'", "its metadata are changed"),
        ("DELETE FROM about", "rows are missing, or its metadata"),
    ],
)
def test_an_edited_study_is_refused(tmp_path, change, words):
    path = tmp_path / "edited.db"
    plain(FOUR, path=path)._store.close()
    with sqlite3.connect(path) as connection:
        connection.execute(change)
    connection.close()
    refused(path, words)


def flips_of_a_study(folder, count, seed=0):
    """Numbers of bit flips after which a study reads differently without a word, or with an error without a name."""
    path, chance, silent, unnamed = folder / "study.db", random.Random(seed), 0, []
    study = plain(FOUR, path=path)
    expected = study.to_dataframe().to_json()
    study._store.close()
    whole = path.read_bytes()
    for _ in range(count):
        changed = bytearray(whole)
        changed[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        try:
            read = Study.open(path)
            silent += read.to_dataframe().to_json() != expected
            read._store.close()
        except pc.errors.PcnetError:
            pass
        except BaseException as error:
            unnamed.append(error)
    return silent, unnamed


def test_no_bit_of_a_study_changes_in_silence(tmp_path):
    assert flips_of_a_study(tmp_path, 300) == (0, [])


def test_a_full_disk_is_named_and_finished_work_is_kept(tmp_path):
    """SQLite's own limit of pages stands for the disk; it rolls back by itself, as on a real one."""
    path = tmp_path / "study.db"
    store = plain(FOUR, path=path)._store
    pages = store._one("PRAGMA page_count")
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StudyError, match=r"study.db' cannot be used: the disk is full; make room"):
        store.plan([[Planned(to_json({"a": i}), 0, "mark", data()) for i in range(500)]])
    store.close()
    assert len(Study.open(path).to_dataframe()) == 4


def test_a_newer_format_is_rejected(tmp_path):
    path = tmp_path / "new.db"
    plain(FOUR, path=path)._store.close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {FORMAT + 1}")
    connection.close()
    refused(path, f"has format {FORMAT + 1}; this pcnet reads up to {FORMAT}")


def test_a_read_only_study_can_be_read(tmp_path):
    path = tmp_path / "kept.db"
    plain(FOUR, path=path)._store.close()
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")  # someone else is the one who may write
    holder.execute("UPDATE inversions SET free_action = 0")
    try:
        assert Study.open(path).best()["free_action"].tolist() == [10.0]
    finally:
        holder.execute("ROLLBACK")
        holder.close()


def test_an_empty_study(tmp_path):
    Store(tmp_path / "a.db", create=True).close()
    with pytest.raises(StudyError, match="the study is empty"):
        Study.open(tmp_path / "a.db").to_dataframe()


# --- running again -----------------------------------------------------------------------------------------------
GRID = {"kappa": [1.0, 0.5], "orders": [2, 3]}
TWICE = np.stack([WORLD.observations.numpy(), WORLD.observations.numpy() + 0.1])


def build(kappa, orders):
    return odem(kappa=kappa, orders=orders, every=4)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "study.db"
    return pc.sweep(build, GRID, TWICE, path, processes=1)


def alone(row, **options):
    graph, schedule = build(row["kappa"], int(row["orders"]))
    return graph.run(TWICE[int(row["replicate"])], schedule=schedule, **options)


def test_full_traces_of_the_winners(swept):
    best = swept.best(by=["replicate", "orders"])
    found = swept.rerun(best)
    assert list(found) == best.index.tolist()
    for number, row in best.iterrows():
        expected = alone(row)
        assert found[number].traces.keys() == expected.traces.keys()
        for key, trace in expected.traces.items():
            np.testing.assert_allclose(found[number].traces[key].values, trace.values, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(found[number].free_action, expected.free_action, rtol=1e-12)
        np.testing.assert_allclose(found[number].free_action, row["free_action"], rtol=1e-12)


def test_re_runs_record_what_is_asked_for(swept):
    (result,) = swept.rerun(
        swept.best(where={"replicate": 1, "orders": 3}), record=pc.Record(("mean",), every=4)
    ).values()
    assert set(result.traces) == {f"{name}.mean" for name in ("x", "theta", "lambda_x", "lambda_y")}
    assert len(result.times) == 3


def test_re_runs_from_a_file_need_build_and_observations(swept):
    study = Study.open(swept.path)
    pd.testing.assert_frame_equal(study.to_dataframe(), swept.to_dataframe())
    best = study.best(by=["replicate", "orders"])
    for options in ({}, {"build": build}, {"observations": TWICE}):
        with pytest.raises(StudyError, match="needs build= and observations="):
            study.rerun(best, **options)
    found = study.rerun(best, build=build, observations=TWICE)
    for number, result in swept.rerun(best).items():
        np.testing.assert_array_equal(found[number].mean("x"), result.mean("x"))
    with pytest.raises(StudyError, match="other observations"):
        study.rerun(best, build=build, observations=TWICE + 0.1)
    with pytest.raises(StudyError, match="another model"):
        study.rerun(best, build=lambda **settings: odem(**settings, every=5), observations=TWICE)


def test_only_rows_of_the_study_are_re_run(swept):
    """The index of another table is not the number of an inversion."""
    for rows in (swept.probabilities(where={"orders": 2}), swept.to_dataframe().reset_index(), [1, 2]):
        with pytest.raises(StudyError, match="rows of to_dataframe"):
            swept.rerun(rows)
    with pytest.raises(StudyError, match="rows of to_dataframe"):
        swept.rerun(swept.best(where={"replicate": 0, "orders": 3}).rename(index=lambda number: number + 1000))

"""Arguments of wrong kinds have errors with a name, wherever they are given."""

from support.fuzz import Fuzz


def test_random_calls_raise_named_errors_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not Fuzz(0).run(400)

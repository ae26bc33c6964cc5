"""CSV tables are read as an independent reader reads them, or refused with their place.

The independent reader is Python's own csv module with float(), applied to those tables that the grammar allows.
"""

import csv
import io
import math
import random

import numpy as np
import pytest

from pcnet.errors import ObservationError
from pcnet.io.csv_table import parse
from pcnet.io.readers import read_observations

MISSING = ("", "nan", "na", "null", "none")


def number(cell):
    return math.nan if cell.lower() in MISSING else float(cell)


def independent(content):
    """Header, if the first row has names, and rows of numbers by Python's csv module; ValueError for others."""
    text = io.StringIO(content.decode("utf-8-sig"), newline="")
    rows = [[cell.strip(" \t") for cell in row] for row in csv.reader(text, strict=True, skipinitialspace=True)]
    while rows and (not rows[-1] or rows[-1] == [""]):
        rows.pop()
    header = None
    try:
        _ = [number(cell) for cell in rows[0]]
    except ValueError:
        header = rows.pop(0)
    return header, np.array([[number(cell) for cell in row] for row in rows])


TABLES = (b"a,b,c\n1,2.5,3\n4,,-6e-3\nNA,8,9\n", b"1,2,3\n4,NaN,6\n7,8,9\n")
PIECES = (b",", b"\n", b'"', b" ", b"1e5", b"x", b"\r\n", b"NA", b".", b"-", b"e", b"\xef\xbb\xbf", b"_", b"inf")


def mutated(chance):
    content = bytearray(chance.choice(TABLES))
    for _ in range(chance.randint(1, 3)):
        place, way = chance.randrange(len(content)), chance.randrange(3)
        if way == 0:
            content[place:place] = chance.choice(PIECES)
        elif way == 1:
            del content[place : place + chance.randint(1, 4)]
        else:
            content[place] = chance.randrange(256)
    return bytes(content)


def differences(count, seed=0):
    """How many mutated tables are read, and those among them that the independent reader reads otherwise."""
    chance, read, wrong = random.Random(seed), 0, []
    for _ in range(count):
        content = mutated(chance)
        try:
            found = parse(content)
        except ObservationError:
            continue
        read += 1
        try:
            header, values = independent(content)
            np.testing.assert_array_equal(found.values, values)
            assert found.header == header
        except (ValueError, AssertionError, csv.Error, IndexError):
            wrong.append(content)
    return read, wrong


def test_mutated_tables_are_read_as_an_independent_reader_does_or_refused():
    read, wrong = differences(1500)
    assert read > 80
    assert wrong == []


@pytest.mark.parametrize(
    ("content", "header", "values"),
    [
        (b"\xef\xbb\xbf1,2\n3,4\n", None, [[1, 2], [3, 4]]),
        (b'"1","2"\n3,4', None, [[1, 2], [3, 4]]),
        (b"NA,2\r\n3,4\r\n\r\n", None, [[math.nan, 2], [3, 4]]),
        (b'"a ""b""", c\n1,\n', ['a "b"', "c"], [[1, math.nan]]),
        (b"x\n1\nNaN\n", ["x"], [[1], [math.nan]]),
    ],
)
def test_what_the_grammar_allows(content, header, values):
    found = parse(content)
    assert found.header == header
    np.testing.assert_array_equal(found.values, np.array(values, dtype=float))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"1,2\n3,4,\n", "line 2, column 3: it has 3 cells, and the first line has 2"),
        (b"1,2\n3\n", "line 2, column 2: it has 1 cells"),
        (b"a,a\n1,2\n", "line 1, column 2: the name 'a' occurs more than once"),
        (b"a,1\n1,2\n", "line 1, column 2: '1' is a number beside names"),
        (b"a,\n1,2\n", "line 1, column 2: '' is missing beside names"),
        (b"1,2\n\n3,4\n", "line 2, column 2: .* this line is blank"),
        (b"1\n\n3\n", "line 2, column 1: this line is blank"),
        (b"1,2\n3,1_000\n", "line 2, column 2: '1_000' is not a number"),
        (b"1,2\n3,inf\n", "line 2, column 2: 'inf' is not a number"),
        (b"1,2\n3,1e999\n", "too large"),
        (b'1,2\n3,"4\n', "line 2, column 2: its quotation marks do not match"),
        (b"1,2\n3,\xff\n", "line 2: this is not text in UTF-8"),
        (b"a,b\n", "no observations after the header"),
        (b"\n\n", "there are no observations"),
    ],
)
def test_what_it_does_not(content, words):
    with pytest.raises(ObservationError, match=words):
        parse(content)


def test_the_report_says_what_was_taken_for_what(tmp_path):
    path = tmp_path / "data.csv"
    path.write_bytes(b"t,y.0,y.1\n0,1,2\n1,NA,4\n")
    found = read_observations(path, {"y": 2})
    assert found.report.endswith("2 rows of 2 channels of 'y', from y.0, y.1; 1 values missing; times from t")
    path.write_bytes(b"1,2\n3,4,\n")
    with pytest.raises(ObservationError, match=r"data.csv': line 2, column 3"):
        read_observations(path, {"y": 2})
    np.save(tmp_path / "dates.npy", np.array(["2020-01-01", "2020-01-02"], dtype="datetime64[D]"))
    with pytest.raises(ObservationError, match="must be real numbers"):
        read_observations(tmp_path / "dates.npy", {"y": 1})


def test_files_that_are_too_large_are_refused_in_words(tmp_path, monkeypatch):
    from pcnet.io import csv_table, readers

    path = tmp_path / "y.csv"
    path.write_text("1,2,3\n")
    monkeypatch.setattr(csv_table, "MAX_CELLS", 2)
    with pytest.raises(ObservationError, match="line 1: it has more than 2 cells"):
        read_observations(path, {"y": 3})
    monkeypatch.setattr(readers, "MAX_BYTES", 4)
    with pytest.raises(ObservationError, match=r"give it as \.npy or \.parquet"):
        read_observations(path, {"y": 3})
    with (tmp_path / "y.npy").open("wb") as file:  # 2 PB, by its own account
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (10**14, 3)})
    with pytest.raises(ObservationError, match="does not fit into memory; run it in parts"):
        read_observations(tmp_path / "y.npy", {"y": 3})

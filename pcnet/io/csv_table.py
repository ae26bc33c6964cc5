"""Tables of numbers as CSV, by a written grammar: exactly that is read, and everything else is refused with its place.

    table   = [mark] [header] row {row} {blank line}     the first line decides how many cells each line has
    line    = cell {"," cell} end                        end: LF or CRLF, or the end of the file
    cell    = {blank} (plain | quoted) {blank}           blank: a space or a tab
    plain   = characters other than , " CR LF
    quoted  = '"' {characters other than " CR LF, or '""' for a quotation mark} '"'
    header  = a line with a cell that is neither a number nor missing; all of its cells are names, different ones
    row     = a line whose cells are numbers or missing
    number  = [+ or -] digits [. [digits]] | [+ or -] . digits, both with [e or E [+ or -] digits]; finite
    missing = nothing, NaN, NA, null or None, in any case

A table is text in UTF-8; mark is a byte-order mark. A blank line is one without cells; it may stand only at the end.
A line has at most a million cells.
"""

import math
import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pcnet.errors import ObservationError

ONE = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
NUMBER = re.compile(ONE, re.ASCII)
NUMBERS = re.compile(rf"{ONE}(?:,{ONE})*", re.ASCII)  # a line of numbers alone, which most lines are
MISSING = frozenset(("", "nan", "na", "null", "none"))
BLANKS = " \t"
MAX_CELLS = 1_000_000  # of a line


class Table(NamedTuple):
    """What a CSV file holds: names of the columns, None without a header; numbers (rows, columns), NaN if missing."""

    header: list[str] | None
    values: NDArray[np.float64]


def parse(content: bytes) -> Table:
    """Read a table; `ObservationError` with line and column for anything that the grammar does not have."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = content[: error.start].count(b"\n") + 1
        raise ObservationError(f"line {place}: this is not text in UTF-8") from None
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while lines and not lines[-1].strip(BLANKS):
        lines.pop()
    if not lines:
        raise ObservationError("there are no observations")
    if lines[0].count(",") >= MAX_CELLS:
        raise ObservationError(f"line 1: it has more than {MAX_CELLS:,} cells; an observation is a line")
    first = _cells(lines[0], 1)
    has_header = any(_is_name(cell) for cell in first)
    if has_header:
        _check_header(first)
    rows = np.empty((len(lines) - has_header, len(first)))
    if not len(rows):
        raise ObservationError("there are no observations after the header")
    for number, line in enumerate(lines[has_header:], 1 + has_header):
        if line.count(",") == len(first) - 1 and NUMBERS.fullmatch(line):
            rows[number - 1 - has_header] = found = [float(cell) for cell in line.split(",")]
            if math.inf not in found and -math.inf not in found:
                continue
        cells = _cells(line, number)
        if len(cells) != len(first):
            where = f"line {number}, column {min(len(cells), len(first)) + 1}"
            blank = "; this line is blank" if not line.strip(BLANKS) and len(first) > 1 else ""
            raise ObservationError(f"{where}: it has {len(cells)} cells, and the first line has {len(first)}{blank}")
        if len(first) == 1 and not line.strip(BLANKS):
            raise ObservationError(f"line {number}, column 1: this line is blank; write NaN for a missing value")
        rows[number - 1 - has_header] = [_number(cell, number, place) for place, cell in enumerate(cells, 1)]
    return Table(first if has_header else None, rows)


def _cells(line: str, number: int) -> list[str]:
    """The cells of a line, without quotation marks and blanks around them."""
    if "\r" in line or "\0" in line:
        raise ObservationError(f"line {number}: there is a control character in it")
    if '"' not in line:
        return [cell.strip(BLANKS) for cell in line.split(",")]
    found, place = list[str](), 0
    while True:
        match = CELL.match(line, place)
        if match is None:
            raise ObservationError(f"line {number}, column {len(found) + 1}: its quotation marks do not match")
        quoted, plain = match.groups()
        found.append(plain.strip(BLANKS) if quoted is None else quoted.replace('""', '"').strip(BLANKS))
        place = match.end()
        if place == len(line):
            return found
        place += 1  # the comma


CELL = re.compile(r'[ \t]*(?:"((?:[^"]|"")*)"[ \t]*|([^",]*))(?=,|$)')


def _is_name(cell: str) -> bool:
    return cell.lower() not in MISSING and NUMBER.fullmatch(cell) is None


def _check_header(names: list[str]) -> None:
    seen = set[str]()
    for place, name in enumerate(names, 1):
        if not _is_name(name):
            what = "a number" if name.lower() not in MISSING else "missing"
            raise ObservationError(
                f"line 1, column {place}: {name!r} is {what} beside names; a header has a name for each column"
            )
        if name in seen:
            raise ObservationError(f"line 1, column {place}: the name {name!r} occurs more than once")
        seen.add(name)


def _number(cell: str, line: int, column: int) -> float:
    if cell.lower() in MISSING:
        return math.nan
    if NUMBER.fullmatch(cell) is None:
        raise ObservationError(f"line {line}, column {column}: {_short(cell)} is not a number{_remedy(cell)}")
    value = float(cell)
    if math.isinf(value):
        raise ObservationError(f"line {line}, column {column}: {_short(cell)} is too large for a number")
    return value


def _remedy(cell: str) -> str:
    """What to do about some cells that are not numbers."""
    if ";" in cell or "\t" in cell:
        return "; columns are divided by commas, and decimals by points: pandas.read_csv(file, sep=';', decimal=',')"
    if re.match(r"\d{4}-\d\d-\d\d|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\d{1,2}:\d\d", cell):
        return "; a time is a number, such as seconds from the first observation on"
    return ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else text[:37] + "…"

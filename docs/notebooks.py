"""Notebooks of the how-to pages, made from them: examples/notebooks/howto.

Run:  python docs/notebooks.py
Text becomes markdown, python becomes code with what it prints as its output, and shell commands become `%%bash` cells.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "examples" / "notebooks" / "howto"
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def notebook(text: str) -> str:
    """The notebook of a page, as JSON."""
    cells: list[dict[str, Any]] = []
    place = 0
    for found in FENCE.finditer(text):
        _markdown(cells, text[place : found.start()])
        place, language, code = found.end(), found[1], found[2]
        if language == "text":
            cells[-1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": code.splitlines(True)}]
        else:
            source = code if language == "python" else f"%%bash\n{code}"
            cells.append(_cell(cells, "code", source.rstrip()) | {"outputs": [], "execution_count": None})
    _markdown(cells, text[place:])
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    made = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, ensure_ascii=False, indent=1) + "\n"


def _markdown(cells: list[dict[str, Any]], text: str) -> None:
    """Add text as a cell; references to the reference become plain code."""
    text = re.sub(r"\[(`[^`]+`)\]\[[^\]]*\]", r"\1", text).strip()
    if text:
        cells.append(_cell(cells, "markdown", text))


def _cell(cells: list[dict[str, Any]], kind: str, source: str) -> dict[str, Any]:
    return {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": source.splitlines(True)}


def pages() -> list[Path]:
    return [page for page in sorted((HERE / "howto").glob("*.md")) if page.stem != "index"]


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for page in pages():
        (FOLDER / f"{page.stem}.ipynb").write_text(notebook(page.read_text(encoding="utf-8")), encoding="utf-8")

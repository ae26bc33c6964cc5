"""What others have written is known by version and digest."""

import hashlib
import json
import re
import tomllib

from support.paths import ROOT


def components(kind):
    bill = json.loads((ROOT / "bill-of-materials.json").read_text())
    return [each for each in bill["components"] if each["type"] == kind]


def test_the_bill_of_materials_lists_what_is_pinned():
    pins = dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    assert {each["name"]: each["version"] for each in components("library")} == pins


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {each["name"].lower().replace("_", "-") for each in components("library")}
    for requirement in (*project["dependencies"], *project["optional-dependencies"]["dev"]):
        assert re.match(r"[A-Za-z0-9_.-]+", requirement).group().lower().replace("_", "-") in pins


def test_vendored_files_are_those_of_the_bill():
    (found,) = components("file")
    content = (ROOT / found["properties"][0]["value"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == found["hashes"][0]["content"]
    assert f'version="{found["version"]}"'.encode() in content

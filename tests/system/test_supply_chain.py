"""What others have written is known by version and digest."""

import hashlib
import json
import re
import tomllib

from support.paths import ROOT


def components(kind):
    bill = json.loads((ROOT / "bill-of-materials.json").read_text())
    return [each for each in bill["components"] if each["type"] == kind]


def locked():
    """Entries of the lock files: name, version and all that follows."""
    text = "".join(path.read_text() for path in sorted(ROOT.glob("requirements*.lock")))
    found = [entry for entry in re.split(r"^(?=\w)", text, flags=re.M) if not entry.startswith("#")]
    return [re.match(r"([\w.-]+)==([^\s;]+)(.*)", entry, re.S).groups() for entry in found]


def test_the_bill_of_materials_lists_what_is_pinned():
    pins = {(name, version) for name, version, _ in locked()}
    assert {(each["name"], each["version"]) for each in components("library")} == pins


def test_every_pin_is_a_release_with_hashes():
    for name, version, rest in locked():
        assert not re.search("nightly|dev", name + version), name
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\s", rest), name
        assert "//" not in rest


def test_the_makefile_installs_nothing_without_a_hash():
    uses = [line for line in (ROOT / "Makefile").read_text().splitlines() if "$(INSTALL)" in line]
    assert len(uses) == 6
    for line in uses:
        assert line.count("$(INSTALL)") == line.count("--require-hashes -r requirements") or line.endswith(" -e .")
    others = [line for line in (ROOT / "Makefile").read_text().splitlines() if "pip install" in line]
    assert all("--require-hashes -r requirements" in line for line in others if not line.startswith("INSTALL := "))
    assert "--no-deps" in re.search("^INSTALL := (.*)$", (ROOT / "Makefile").read_text(), re.M).group()


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

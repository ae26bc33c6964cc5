"""Streams lose nothing that was answered: signals end them with a checkpoint, and a journal outlives kill -9."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import pcnet as pc
from pcnet.errors import ObservationError
from pcnet.graphs import odem
from pcnet.io.command_line import app
from pcnet.io.journal import Journal
from support.waiting import PATIENCE

PROGRAM = "from pcnet.io import streaming as s; s.MAX_LINE = {limit}; from pcnet.io.command_line import app; app()"
Y = 1 + 0.1 * np.random.default_rng(0).normal(size=(20, 3))
LINES = [", ".join(map(repr, row.tolist())) for row in Y]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pc.save_model("graph.yaml", odem(orders=2, every=4))
    return tmp_path


def pcnet(*arguments, **options):
    return CliRunner().invoke(app, ["run", "graph.yaml", "--observations", "-", *arguments], **options)


def answers(done):
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def entries(path, content):
    """What a journal holds of a model whose journal has this content."""
    with contextlib.closing(Journal(path, json.loads(content.splitlines()[0])["model"], 0)) as journal:
        return journal.entries


class Stream:
    """The command as a process of its own, line by line."""

    def __init__(self, *arguments):
        program = "from pcnet.io.command_line import app; app()"
        command = [sys.executable, "-c", program, "run", "graph.yaml", "--observations", "-", *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, **pipes, text=True)

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self, number):
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        said = self.process.stderr.read()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()
        return code, said


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_stream_with_a_checkpoint(folder, name):
    stream = Stream("--checkpoint", "run")
    for line in LINES[:5]:
        stream.ask(line)
    code, said = stream.end(getattr(signal, name))
    assert code == 128 + getattr(signal, name)
    assert said.strip() == f"pcnet: ended by {name}; finished work is kept"
    assert pc.resume("run").tick == 5


def test_after_kill_9_every_answered_line_is_recovered(folder):
    stream = Stream("--journal", "run.journal", "--checkpoint", "run", "--checkpoint-every", "4")
    for line in LINES[:7]:
        last = stream.ask(line)
    assert stream.end(signal.SIGKILL)[0] == -signal.SIGKILL
    with open("run.journal", "ab") as file:  # noqa: PTH123
        file.write(b'{"line": "cut off')
    for resume in ([], ["--resume", "run"]):
        done = pcnet("--journal", "run.journal", *resume, input=LINES[7] + "\n")
        assert done.exit_code == 0, done.output
        assert f"{7 if not resume else 3} observations were recovered" in done.stderr
        (found,) = answers(done)
        assert found["observation"] == last["observation"] + 1
        with open("run.journal", "rb+") as file:  # without the line that was just answered  # noqa: PTH123
            lines = file.read().splitlines(keepends=True)
            file.truncate(sum(map(len, lines[:-1])))
    whole = pcnet(input="\n".join(LINES[:8]) + "\n")
    assert answers(whole)[-1] == found


def test_a_damaged_or_foreign_journal_is_refused(folder):
    path = folder / "run.journal"
    assert pcnet("--journal", "run.journal", input="\n".join(LINES[:6]) + "\n").exit_code == 0
    content, chance = path.read_bytes(), random.Random(0)
    mark = entries(path, content)
    assert [entry.line for entry in mark] == LINES[:6]
    for _ in range(300):
        changed = bytearray(content)
        changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        try:  # the end of the last line may look cut off; nothing else passes
            read = entries(path, content)
            assert read == mark[: len(read)]
            assert len(read) == 5
        except ObservationError:
            pass
    path.write_bytes(content)
    pc.save_model("graph.yaml", odem(orders=3))
    done = pcnet("--journal", "run.journal", input="1,1,1\n")
    assert done.exit_code == 2
    assert "journal of another model" in done.stderr


@pytest.mark.parametrize("content", [b"my only copy", b"\0" * 5000, b'{"model": "'], ids=["text", "zeros", "beginning"])
def test_another_file_without_a_whole_line_is_not_lost(folder, content):
    """Only the beginning of a first entry was left by a crash, and may go."""
    path = folder / "other"
    path.write_bytes(content)
    done = pcnet("--journal", "other", input=LINES[0] + "\n")
    assert (done.exit_code == 0) == content.startswith(b"{")
    assert content.startswith(b"{") or ("is not a journal" in done.stderr and path.read_bytes() == content)


def test_a_journal_is_for_streams(folder):
    np.savetxt("data.csv", Y, delimiter=",")
    done = CliRunner().invoke(app, ["run", "graph.yaml", "--observations", "data.csv", "--journal", "j"])
    assert done.exit_code == 2
    assert "--journal is for standard input" in done.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [(b"1,1,1\n\xff\xfe,1,1\n", "line 2 is not text in UTF-8, at byte 1"), (b"1,1\n", "line 1: ")],
)
def test_input_that_is_no_text_is_named(folder, given, words):
    done = pcnet(input=given)
    assert done.exit_code == 2
    assert words in done.stderr
    assert "Traceback" not in done.output


def test_a_byte_order_mark_on_standard_input_is_skipped(folder):
    assert len(answers(pcnet(input=b"\xef\xbb\xbf1,1,1\n"))) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")  # noqa: PTH110
def test_a_full_disk_below_standard_output_is_named(folder):
    program = "from pcnet.io.command_line import app; app()"
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-c", program, "run", "graph.yaml", "--observations", "-"],
            input="1,1,1\n1,1,1\n",
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert done.returncode == 2
    assert "the disk is full" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_journal_belongs_to_one_stream_at_a_time(tmp_path):
    path = tmp_path / "journal"
    first = Journal(path, "model", 0)
    first.add(0, "1")
    with pytest.raises(ObservationError, match="is in use; give each stream a journal of its own"):
        Journal(path, "model", 0)
    first.add(1, "2")
    first.close()
    again = Journal(path, "model", 0)
    assert [entry.line for entry in again.entries] == ["1", "2"]
    again.close()


def test_a_journal_that_is_cut_off_anywhere_keeps_what_is_whole(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path, "model", 0)
    for k in range(3):
        journal.add(k, f"{k}, 1")
    journal.close()
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        journal = Journal(path, "model", 0)
        assert len(journal.entries) == max(0, whole[:length].count(b"\n") - 1)
        journal.close()


@pytest.mark.parametrize(
    "line", ["1_0, 1, 1", "١, 1, 1", "0x1, 1, 1", "1, 1, 1\0", "1; 1; 1", "１, 1, 1", "1e999, 1, 1"]
)
def test_numbers_of_other_dialects_are_refused(folder, line):
    done = pcnet(input=line + "\n")
    assert done.exit_code == 2
    assert "line 1" in done.stderr
    assert answers(done) == []


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(folder):
    with Path("/dev/zero").open("rb") as endless:
        command = [sys.executable, "-c", PROGRAM.format(limit=1000), "run", "graph.yaml", "--observations", "-"]
        done = subprocess.run(command, stdin=endless, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2
    assert "line 1 is longer than" in done.stderr

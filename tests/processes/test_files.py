"""Work shared through files: a claim holds for one process and dies with it; nothing is made twice or left out."""

import errno
import json
import os
import shutil
import signal
import time

import pytest
import torch

from ssd_train.processes import files
from ssd_train.processes.files import Claims, claim, remove_strays, replacing, share_out


@pytest.fixture
def fork():
    """Runs a function in a child process; returns its pid. All are gone afterwards."""
    children = []

    def start(function):
        child = os.fork()
        if child == 0:
            try:
                function()
            finally:
                os._exit(0)
        children.append(child)
        return child

    yield start
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_claim_holds_for_one_process_and_dies_with_it(tmp_path, fork):
    """A child claims piece 1 and is killed: until then it is not to be had, others are; afterwards it is."""
    lock = tmp_path / "claims.lock"
    ready, claimed = os.pipe()

    def hold():
        with claim(lock, 1):
            os.write(claimed, b"x")
            time.sleep(60)

    child = fork(hold)
    assert os.read(ready, 1) == b"x"
    with claim(lock, 1, wait=False) as mine:
        assert not mine
    with claim(lock, 0, wait=False) as other:
        assert other
    os.kill(child, signal.SIGKILL)
    with claim(lock, 1, wait=True) as mine:
        assert mine


def test_strays_are_removed_once_their_process_is_dead(tmp_path, fork):
    """A child is killed with half a file written. The old file stays, and so does what is no temporary file."""
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"old")
    (tmp_path / ".hidden").touch()
    (tmp_path / ".mine.tmp-1").touch()
    ready, writing = os.pipe()

    def write():
        with replacing(path) as file:
            file.write(b"half")
            file.flush()
            os.write(writing, b"x")
            time.sleep(60)

    child = fork(write)
    assert os.read(ready, 1) == b"x"
    [stray] = tmp_path.glob(".last.ckpt.tmp-*")
    remove_strays(tmp_path)
    assert stray.read_bytes() == b"half"
    os.kill(child, signal.SIGKILL)
    with claim(stray):  # waits for its end
        pass
    remove_strays(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"last.ckpt", ".hidden", ".mine.tmp-1"}
    assert path.read_bytes() == b"old"
    remove_strays(tmp_path / "not there")


@pytest.mark.parametrize(
    "piece, wait, number", [(0, True, errno.ENOLCK), (0, False, errno.ENOLCK), (0, True, errno.EACCES)]
)
def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, piece, wait, number):
    """Nothing counts as made by another process then."""

    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.fcntl, "lockf", refused)
    why = rf"it cannot be locked \({os.strerror(number)}\); expected a file system with locks, .*claims.lock"
    with pytest.raises(OSError, match=why), claim(tmp_path / "claims.lock", 0, wait):
        pass
    with pytest.raises(OSError, match=why), files.Claims(tmp_path / "claims.lock") as claims:
        list(share_out(claims, range(3), lambda i, again: False))
    files.write_atomically(tmp_path / "a", b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole"


def test_no_two_writers_share_a_temporary_name(tmp_path):
    """Nor do two containers with equal pids."""
    path = tmp_path / "a"
    with replacing(path) as first:
        first.write(b"first")
        with replacing(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": 1}', '{"a": 2, "digest": "%s"}', b"\xff"])
def test_json_that_was_not_written_here_is_refused_by_name(tmp_path, text):
    path = tmp_path / "some.json"
    assert files.read_json(path) is None
    files.write_json(path, {"a": 1})
    assert files.read_json(path) == {"a": 1}
    digest = json.loads(path.read_text())["digest"]
    path.write_bytes(text if isinstance(text, bytes) else text.replace("%s", digest).encode())
    with pytest.raises(files.DamagedFile, match=r"/some.json (holds|is damaged).*; make it again"):
        files.read_json(path, "make it again")


def test_no_file_stands_for_another(tmp_path):
    files.write_json(tmp_path / "a.json", {"a": 1})
    files.save_tensors(tmp_path / "a", {"x": torch.zeros(3), "y": torch.tensor(1)})
    for name in "a.json", "a":
        shutil.copy(tmp_path / name, tmp_path / f"b{name}")
    assert files.load_tensors(tmp_path / "a", "")["y"] == 1
    with pytest.raises(files.DamagedFile, match=r"ba.json is damaged"):
        files.read_json(tmp_path / "ba.json")
    with pytest.raises(files.DamagedFile, match=r"/ba is damaged: .*; make it again"):
        files.load_tensors(tmp_path / "ba", "make it again")


def test_a_file_taken_for_a_stray_before_it_is_locked_is_written_all_the_same(tmp_path, monkeypatch):
    lock, calls = files.fcntl.lockf, iter(range(100))

    def late(file, *arguments):
        if next(calls) == 0:
            os.unlink(file.name)  # as another process's remove_strays would
        lock(file, *arguments)

    monkeypatch.setattr(files.fcntl, "lockf", late)
    files.write_atomically(tmp_path / "a", b"whole")
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"whole"


def test_each_piece_is_made_once_and_a_dead_process_s_by_another(tmp_path, fork):
    """Three processes share twelve pieces; one of them dies over its second."""
    log = tmp_path / "made"

    def work(dies):
        claims = Claims(tmp_path / "claims.lock")
        pieces = share_out(claims, range(12), lambda i, again: (tmp_path / str(i)).exists())
        for made, piece in enumerate(pieces):
            if dies and made == 1:
                os._exit(1)
            time.sleep(0.02)
            with log.open("a") as file:
                file.write(f"{piece}\n")
            (tmp_path / str(piece)).touch()
            claims.release(piece)

    fork(lambda: work(dies=True))
    fork(lambda: work(dies=False))
    work(dies=False)
    assert sorted(map(int, log.read_text().split())) == list(range(12))


def test_processes_that_hold_a_piece_each_do_not_wait_for_each_other_for_ever(tmp_path, fork):
    """Both come to wait for the other's piece before their own is made."""

    def work(first):
        mine = []

        def finish():
            for piece in mine:
                (tmp_path / str(piece)).touch()
                claims.release(piece)
            mine.clear()

        with Claims(tmp_path / "claims.lock") as claims:
            pieces = share_out(claims, [first, 1 - first], lambda i, again: (tmp_path / str(i)).exists(), finish)
            for piece in pieces:
                mine.append(piece)
                (tmp_path / f"claimed {piece}").touch()
                while not (tmp_path / f"claimed {1 - piece}").exists():
                    time.sleep(0.001)
            finish()

    fork(lambda: work(1))
    work(0)
    assert {path.name for path in tmp_path.glob("?")} == {"0", "1"}

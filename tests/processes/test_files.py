"""Work shared through files: a claim holds for one process and dies with it; nothing is made twice or left out."""

import os
import signal
import time

import pytest

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
    ready, writing = os.pipe()

    def write():
        with replacing(path) as file:
            file.write(b"half")
            file.flush()
            os.write(writing, b"x")
            time.sleep(60)

    child = fork(write)
    assert os.read(ready, 1) == b"x"
    stray = tmp_path / f".last.ckpt.tmp-{child}"
    remove_strays(tmp_path)
    assert stray.read_bytes() == b"half"
    os.kill(child, signal.SIGKILL)
    with claim(stray):  # waits for its end
        pass
    remove_strays(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"last.ckpt", ".hidden"}
    assert path.read_bytes() == b"old"
    remove_strays(tmp_path / "not there")


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

"""Work shared through files: a claim holds for one process and dies with it; nothing is made twice or left out."""

import os
import signal
import time

import pytest

from ssd_train.files import claim, share_out


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


def test_each_piece_is_made_once_and_a_dead_process_s_by_another(tmp_path, fork):
    """Three processes share twelve pieces; one of them dies over its second."""
    log = tmp_path / "made"

    def work(dies):
        pieces = share_out(tmp_path / "claims.lock", range(12), lambda i, again: (tmp_path / str(i)).exists())
        for made, piece in enumerate(pieces):
            if dies and made == 1:
                os._exit(1)
            time.sleep(0.02)
            with log.open("a") as file:
                file.write(f"{piece}\n")
            (tmp_path / str(piece)).touch()

    fork(lambda: work(dies=True))
    fork(lambda: work(dies=False))
    work(dies=False)
    assert sorted(map(int, log.read_text().split())) == list(range(12))

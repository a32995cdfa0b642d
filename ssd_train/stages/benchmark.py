"""The decode stage with a folder of its own: many decoders beside each other. Batches that either stage has decoded are
not decoded again."""

from ssd_train.runs.run import Run
from ssd_train.stages import decode

check = decode.check


def run(run: Run) -> None:
    decode.run(run, "benchmark")

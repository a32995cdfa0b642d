"""The stages of a run, each ``run(Run)``: the only places where configuration meets Trainer, loggers and files."""

from ssd_train.stages import cache, decode, export, train

STAGES = {"cache": cache.run, "train": train.run, "export": export.run, "decode": decode.run}

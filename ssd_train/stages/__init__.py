"""The stages of a run: the only places where configuration meets Trainer, loggers and files.

Each has ``run(Run)``, and ``check(Run)``, which raises what can be known to be wrong before any stage has run.
"""

from ssd_train.stages import benchmark, cache, decode, evaluate, export, phrases, plan, train

STAGES = {
    "plan": plan, "cache": cache, "phrases": phrases, "train": train, "export": export, "decode": decode,
    "benchmark": benchmark, "evaluate": evaluate,
}  # fmt: skip

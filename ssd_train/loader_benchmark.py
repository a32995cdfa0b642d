"""How fast training goes, and how much of that time it waits for samples, at a model's own settings.

    python -m ssd_train.loader_benchmark +model=tiny            # after its cache stage
    python -m ssd_train.loader_benchmark +model=tiny train.workers=2 train.shuffle_buffer=64 --steps 200

It trains for a while and throws the result away. To read: a loader that alone gives several times the samples a second
that training takes never holds training up; if training waits, raise train.workers.
"""

import argparse
import tempfile
from itertools import islice
from time import perf_counter

from hydra import compose, initialize_config_dir
from torch.utils.data import DataLoader

from ssd_train import config
from ssd_train.runs.run import Run
from ssd_train.runs.tracking import Throughput
from ssd_train.stages.train import make_heads, make_trainer
from ssd_train.training.datamodule import HeadDataModule, TrainingStream
from ssd_train.training.module import HeadModule

WARM_UP = 5  # batches


def training(run: Run, data: HeadDataModule, steps: int) -> tuple[float, float]:
    """(samples a second, share of the time waiting for the loader) over the last ``steps`` batches of a training."""
    heads = make_heads(run, data)
    throughput = Throughput()
    trainer = make_trainer(run, WARM_UP + steps, False, throughput)
    trainer.log_every_n_steps = steps  # over as many batches Throughput averages
    module = HeadModule(
        heads, run.backbone.output, run.backbone.grid, run.sampling, run.cfg.head, WARM_UP + steps, run.cfg.seed
    )
    trainer.fit(module, data)
    samples, wait, everything = map(sum, zip(*throughput.batches, strict=True))
    return samples / everything, wait / everything


def loading(data: HeadDataModule, batches: int) -> float:
    """Samples a second with nobody training, over these batches; the start of the workers is not counted."""
    stream = TrainingStream(data.shards, data.batch_size, data.shuffle, data.seed)
    loader = iter(DataLoader(stream, batch_size=None, num_workers=data.workers))
    next(loader)
    start = perf_counter()
    samples = sum(len(batch["index"]) for batch in islice(loader, batches))
    return samples / (perf_counter() - start)


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("overrides", nargs="+", help="as for python -m ssd_train")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_intermixed_args()
    config.register()
    with (
        tempfile.TemporaryDirectory() as output,
        initialize_config_dir(str(config.conf_dir()), version_base="1.3"),
    ):
        run = Run(compose("config", [*arguments.overrides, f"output={output}"]))
        cfg = run.cfg.train
        data = HeadDataModule(
            run.cache_dir, run.cfg.cache.samples, cfg.batch_size, cfg.shuffle_buffer, cfg.workers, run.cfg.seed,
            cfg.validation_samples,
        )  # fmt: skip
        alone = loading(data, arguments.steps)
        rate, wait = training(run, data, arguments.steps)
    print(
        f"{run.backbone.name}: train.batch_size={cfg.batch_size} train.workers={cfg.workers} "
        f"train.shuffle_buffer={cfg.shuffle_buffer}, {arguments.steps} steps: training takes {rate:.1f} samples/s and "
        f"waits for the loader {wait:.1%} of the time; the loader alone gives {alone:.1f} samples/s"
    )


if __name__ == "__main__":
    main()

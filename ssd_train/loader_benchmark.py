"""How fast samples come from shards, at a model's own sizes and settings; neither checkpoint nor cache is needed.

    python -m ssd_train.loader_benchmark +model=janus_pro_7b
    python -m ssd_train.loader_benchmark +model=emu3 cache.dtype=bfloat16 train.workers=2 --rounds 5

It fills a temporary folder with shards of random states, four batches for each worker, and has them loaded by
train.workers processes as training has them, with nobody training. The last line is JSON: ``of_plain_read`` is the rate
over that of reading the same files from end to end, with the same checksum, into memory that is there already. Both are
the best of several rounds, in which they take turns. The files lie in the page cache: a slower disk sets its own pace.
"""

import argparse
import json
import tempfile
import zlib
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from time import perf_counter, thread_time

import torch
from hydra import compose, initialize_config_dir

from ssd_train import config
from ssd_train.backbones.sketches import sketch
from ssd_train.cache.shards import CHUNK, Sample, ShardCache
from ssd_train.config import Config
from ssd_train.grid import Grid
from ssd_train.prompts import Split, split_of
from ssd_train.training.datamodule import HeadDataModule, TrainingStream

BATCHES = 4  # of each worker, that the shards hold
WARM_UP = 4  # batches of each worker


def prompts(split: Split) -> Iterator[str]:
    return (text for text in map("prompt {}".format, count()) if split_of(text) is split)


def fill(directory: Path, cfg: Config, grid: Grid, width: int) -> tuple[int, float]:
    """Makes a cache of random states. Returns its number of samples, and its bytes over the seconds of one core that
    packing and writing them took."""
    training = BATCHES * cfg.train.batch_size * max(1, cfg.train.workers)
    texts = [*islice(prompts(Split.TRAIN), training), *islice(prompts(Split.VALIDATION), 1)]
    cache, size, seconds, written = ShardCache(directory), min(cfg.cache.shard_size, len(texts)), 0.0, 0
    cache.pin({"shard_size": size, "fingerprint": "random"})
    generator = torch.Generator().manual_seed(cfg.seed)
    streams = 1 + (cfg.model.sampling.guidance != 1)

    def samples(first: int) -> Iterator[Sample]:
        nonlocal seconds
        for index in range(first, min(first + size, len(texts))):
            hidden = torch.randn(streams, grid.size, width, generator=generator)
            tokens = torch.randint(2, (grid.height, grid.width), generator=generator)
            start = thread_time()
            yield Sample.of(index, texts[index], 0, tokens, hidden, "random", cfg.cache.dtype)
            seconds += thread_time() - start  # written it is when the next one is asked for

    for shard, first in enumerate(range(0, len(texts), size)):
        written += cache.write(shard, samples(first)).bytes
    cache.write_index(shard + 1)
    return len(texts), written / seconds


def read(files: list[Path]) -> float:
    """Bytes a second of plain reading."""
    memory, start, total = memoryview(bytearray(CHUNK)), perf_counter(), 0
    for path in files:
        checksum = 0
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(memory):
                checksum = zlib.crc32(memory[:size], checksum)
                total += size
    return total / (perf_counter() - start)


def load(data: HeadDataModule, device: str, batches: int) -> float:
    """Samples a second. The workers' start and first batches, which make the memory for those after, do not count."""
    loader = iter(data.loader(TrainingStream(data.shards, data.batch_size, data.shuffle, data.seed), device))
    start = samples = 0
    for made in range(-WARM_UP * max(1, data.workers), batches):
        if made == 0:
            start = perf_counter()
        batch = next(loader)
        samples += len(batch["index"]) * (made >= 0)
        batch.give_back()
    return samples / (perf_counter() - start)


def measure(cfg: Config, folder: Path, rounds: int) -> dict:
    """What the last line says."""
    backbone = sketch(cfg.model)
    samples, writing = fill(folder, cfg, backbone.grid, backbone.width)
    files = sorted(folder.glob("*.tar"))
    train = cfg.train
    data = HeadDataModule(
        folder, samples, train.batch_size, train.shuffle_buffer, train.workers, cfg.seed, validation_samples=1
    )
    batches, device = 3 * BATCHES * max(1, train.workers), config.device(cfg).type
    rates, plain = zip(*((load(data, device, batches), read(files)) for _ in range(rounds)), strict=True)
    size = sum(path.stat().st_size for path in files) / samples
    print(
        f"{cfg.model.name}: {size / 1e6:.1f} MB a sample; one core packs and writes {writing / 1e6:,.0f} MB/s, and "
        f"reads plainly {max(plain) / 1e6:,.0f} MB/s"
    )
    return {
        "model": cfg.model.name,
        "dtype": cfg.cache.dtype.value,
        "workers": train.workers,
        "samples_per_second": round(max(rates), 1),
        "megabytes_per_second": round(max(rates) * size / 1e6, 1),
        "of_plain_read": round(max(rates) * size / max(plain), 3),
    }


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("overrides", nargs="+", help="as for python -m ssd_train")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_intermixed_args()
    config.register()
    with tempfile.TemporaryDirectory() as folder, initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
        cfg = compose("config", [*arguments.overrides, f"output={folder}"])
        config.check(cfg)
        print(json.dumps(measure(cfg, Path(folder), arguments.rounds)))


if __name__ == "__main__":
    main()

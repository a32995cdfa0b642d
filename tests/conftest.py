"""A micro Janus checkpoint on disk, and runs on it."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import micro
import pytest
from hydra import compose, initialize_config_dir
from transformers import GenerationConfig

from ssd_train import config
from ssd_train.runs.run import Run
from ssd_train.tiny.tokenizer import BOI, build_tokenizer

MICRO = [
    "+model=tiny",
    "model.name=micro",
    "model.backbone.dtype=float64",
    "model.sampling={guidance: 2.0, temperature: 1.0, top_k: 0, top_p: 1.0}",
    "++model.scorer=null",
    "++model.category=null",
    "++model.features=null",
    "device=cpu",
    "threads=1",
    "logger=csv",
    "decoder=ar",
    "cache.samples=60",  # of which 6 are for validation
    "cache.shard_size=20",
    "cache.batch_size=10",
    "cache.dtype=float32",
    "head.k_horizontal=2",
    "head.k_vertical=2",
    "head.context=1",
    "train.batch_size=4",
    "train.workers=0",
    "train.shuffle_buffer=8",
    "decode.prompts=4",
    "decode.timed_images=1",
]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """4x4 tokens of 12, width 16, float64, 8x8 pixels; its tokenizer knows tiny's captions."""
    directory = tmp_path_factory.mktemp("micro")
    micro.janus_model(vocabulary=12, grid=(4, 4), scale=14.0).save_pretrained(directory)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(directory)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        generation_kwargs={"boi_token_id": tokenizer.convert_tokens_to_ids(BOI)},
    ).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def settings(checkpoint):
    """(directory, further overrides) -> the command line of a run on the micro checkpoint."""

    def build(directory, *overrides):
        places = [f"cache.dir={directory}/cache", f"output={directory}/run", f"model.backbone.checkpoint={checkpoint}"]
        # Hydra cannot set a part of what is null.
        without = [] if any("head.corrector" in override for override in overrides) else ["head.corrector=null"]
        return [*MICRO, *without, *places, *overrides]

    return build


@pytest.fixture(scope="session")
def make_run(settings):
    """(directory, further overrides) -> Run."""
    config.register()

    def build(directory, *overrides):
        with initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
            cfg = compose("config", settings(directory, *overrides))
        config.check(cfg)
        return Run(cfg)

    return build


@pytest.fixture(scope="session")
def cached(make_run, tmp_path_factory):
    """A directory with a complete cache; read it, never write to it."""
    from ssd_train.stages import cache

    directory = tmp_path_factory.mktemp("cached")
    cache.run(make_run(directory))
    return directory

"""Damaged files: whatever happens to a file that a run has written, it is made again, refused by its name, or the
result is the same. FUZZ=1000 tries so many damages of each file; the suite tries a few, the same ones every time."""

import os
import random
import re
import shutil
from collections import Counter

import pytest
import torch

from ssd_train.cache.shards import CacheError, ShardCache
from ssd_train.decoding import phrases
from ssd_train.heads.export import HeadsError, load_heads, read_config
from ssd_train.processes.files import DamagedFile, load_tensors, read_json
from ssd_train.prompts import Split
from ssd_train.stages import cache, decode, export, train
from ssd_train.stages import phrases as phrases_stage
from ssd_train.stages.cache import identity
from ssd_train.training.checkpoints import read_checkpoint
from ssd_train.training.datamodule import HeadDataModule

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{noise}")
    for noise in ("exists and is not empty", "does not have many workers", "LeafSpec", "Cannot dispatch to fused")
]
ROUNDS = int(os.environ.get("FUZZ", 25))
REFUSALS = CacheError, DamagedFile, HeadsError, phrases.PhrasesError


@pytest.fixture(scope="module")
def whole(make_run, tmp_path_factory):
    """Every kind of file that the stages write."""
    directory = tmp_path_factory.mktemp("whole")
    run = make_run(directory, "cache.samples=60", "train.epochs=0.2", "decode.batch_size=2", "decoder=[ar,ssd]")
    everything(run)
    return run


def everything(run):
    for stage in cache, phrases_stage, train, export, decode:
        stage.run(run)


# -- what is read, and by whom ------------------------------------------------------------------------------------


def samples(run):
    """As training reads them, with nothing looked at before."""
    data = HeadDataModule(run.cache_dir, 60, 4, 0, 0, 0, 4)
    return [
        (s.index, s.prompt, s.seed, s.backbone, s.load().tokens, s.load().hidden)
        for split in (Split.TRAIN, Split.VALIDATION)
        for s in data.shards.read(split)
    ]


def entries(run, verify):
    return [ShardCache(run.cache_dir).entry(shard, verify) for shard in range(3)]


def manifest(run):
    ShardCache(run.cache_dir).check(identity(run))
    return ShardCache(run.cache_dir).manifest()


def parts(run):
    return [load_tensors(path, "it is made again") for path in sorted(run.output.glob("parts/*/*.safetensors"))]


def heads(run):
    loaded = load_heads(run.heads_dir, run.backbone)
    return loaded.spec, loaded.state_dict(), read_config(run.heads_dir)


READERS = {
    r"\d+\.tar": [samples, lambda run: entries(run, True)],
    r"0.*\.json": [lambda run: entries(run, True), lambda run: entries(run, False)],
    r"index\.json": [samples],
    r"manifest\.json": [manifest],
    r"phrases.*": [lambda run: phrases.load(next(run.cache_dir.glob("phrases-*")))],
    r".*\.ckpt": [lambda run: read_checkpoint(run.checkpoint, "cpu")],
    r"training\.json": [lambda run: read_json(run.output / "training.json")],
    r"config\.json|model\.safetensors": [heads],
    r"\d+-\d+\.safetensors": [parts],
}  # fmt: skip
NOT_READ = (
    r"claims\.lock|manifest\.lock|README\.md|.*\.png|report\.\w+|metrics\.csv|hparams\.yaml|(ar|ssd)\.safetensors"
)


def files(run):
    """Of two of a kind that a run writes many of, and all others that it reads again."""
    found = sorted(p for top in (run.cache_dir, run.output) for p in top.rglob("*") if p.is_file())
    for path in found:
        readers = [r for pattern, r in READERS.items() if re.fullmatch(pattern, path.name)]
        assert len(readers) == 1 or re.fullmatch(NOT_READ, path.name), f"who reads {path}?"
        if readers:
            yield path, readers[0]


# -- damages ------------------------------------------------------------------------------------------------------


def flip(content, rng, others):
    for _ in range(rng.choice([1, 1, 1, 2, 9])):
        at = rng.randrange(len(content))
        content = content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    return content


def cut(content, rng, others):
    return content[: rng.randrange(len(content))]


def zero(content, rng, others):
    start, size = rng.randrange(len(content)), rng.choice([1, 64, 4096])
    return content[:start] + bytes(len(content[start : start + size])) + content[start + size :]


def lengthen(content, rng, others):
    return content + rng.randbytes(rng.choice([1, 500]))


def swap_pieces(content, rng, others):
    size = max(1, min(512, len(content) // 3))
    a, b = sorted(rng.sample(range(len(content) // size), 2))
    a, b = a * size, b * size
    return content[:a] + content[b : b + size] + content[a + size : b] + content[a : a + size] + content[b + size :]


def swap_digits(content, rng, others):
    """Numbers and letters stay what they are, but not where: no parser minds."""
    places = [i for i, byte in enumerate(content[:4096]) if chr(byte).isalnum()]
    a, b = sorted(rng.sample(places, 2))
    return content[:a] + content[b : b + 1] + content[a + 1 : b] + content[a : a + 1] + content[b + 1 :]


def another(content, rng, others):
    return rng.choice(others)


DAMAGES = [flip, flip, flip, cut, zero, lengthen, swap_pieces, swap_digits, another]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def outcome(read, run, expected, name):
    try:
        found = read(run)
    except REFUSALS as error:
        if name not in str(error):
            raise
        return "refused"
    if same(found, expected):
        return "same"
    assert isinstance(found, list), f"another result: {found}"
    again = [entry is None or same(entry, old) for entry, old in zip(found, expected, strict=True)]
    assert all(again), f"another result: {found}"
    return "made again"


def test_no_damage_decides_a_result(whole):
    seen, contents = Counter(), {path: path.read_bytes() for path, _ in files(whole)}
    for path, readers in files(whole):
        rng = random.Random(path.name if path.suffix != ".ckpt" else "checkpoint")
        good = contents[path]
        expected = [read(whole) for read in readers]
        others = [other for other in contents.values() if other != good]
        name = re.sub(r"^0000(\d)\.(tar|json)$", r"0000\1", path.name)
        if name in ("config.json", "model.safetensors"):
            name = "heads/"  # either of the two may be named
        for number in range(ROUNDS):
            damage = DAMAGES[number % len(DAMAGES)]
            content = damage(good, rng, others)
            path.write_bytes(content)
            for read, right in zip(readers, expected, strict=True):
                try:
                    seen[outcome(read, whole, right, name if read is not samples else "")] += 1
                except Exception as error:
                    raise AssertionError(f"{damage.__name__} {number} of {path.name}: {error!r}") from error
            path.write_bytes(good)
    assert seen["refused"] > seen["same"]
    assert seen["made again"] > 0


def test_what_is_damaged_is_made_again_by_the_same_command(whole, make_run, tmp_path, caplog):
    """A bit of every kind of file at once, but for the manifest, which nothing else knows."""
    shutil.copytree(whole.cache_dir, tmp_path / "cache")
    shutil.copytree(whole.output, tmp_path / "run")
    overrides = "cache.samples=60", "train.epochs=0.2", "decode.batch_size=2", "decoder=[ar,ssd]"
    run, rng = make_run(tmp_path, *overrides), random.Random(0)
    damaged = [path for path, _ in files(run) if path.name != "manifest.json"]
    for path in damaged:
        path.write_bytes(flip(path.read_bytes(), rng, []))
    everything(run)
    unlike = {".ckpt", ".png"}
    for path, _ in files(whole):
        again = (run.cache_dir if whole.cache_dir in path.parents else run.output) / path.relative_to(
            whole.cache_dir if whole.cache_dir in path.parents else whole.output
        )
        assert path.suffix in unlike or again.read_bytes() == path.read_bytes(), path

"""The cache stage: the same bytes whatever happens on the way, and a clear refusal of whatever does not belong."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import micro
import numpy as np
import pytest
import torch
from disk import full_for
from omegaconf import OmegaConf
from PIL import Image, ImageOps

from ssd_train.cache.shards import CacheDtype, CacheError, ShardCache
from ssd_train.decoding.engine import Decoder
from ssd_train.decoding.schedules.ar import Autoregressive
from ssd_train.distributions import acceptance_rate, guided_probabilities
from ssd_train.heads.export import save_heads
from ssd_train.heads.predictors import Heads, HeadSpec
from ssd_train.processes.files import sha256
from ssd_train.prompts import Split
from ssd_train.runs.run import Run
from ssd_train.stages import cache as stage
from ssd_train.training.datamodule import Shards

ROOT = Path(__file__).parents[2]


def contents(directory):
    """{name: bytes} of everything that lies there."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def times(directory):
    return {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}


def all_samples(directory):
    shards = Shards(sorted(directory.glob("*.tar")), 10**6)
    samples = [stored.load() for split in (Split.TRAIN, Split.VALIDATION) for stored in shards.read(split)]
    return sorted(samples, key=lambda sample: sample.index)


@pytest.fixture
def copied(cached, tmp_path):
    """A complete cache to break, with its run's settings."""
    shutil.copytree(cached / "cache", tmp_path / "cache")
    return tmp_path


# -- what a cache holds -------------------------------------------------------------------------------------------


def test_a_sample_is_what_ar_makes_of_its_prompt_and_seed_alone(cached, make_run):
    """Tokens bit for bit; states those that the sampling used, rounded to the cache dtype."""
    run = make_run(cached)
    samples = all_samples(cached / "cache")
    assert [s.index for s in samples] == [p.index for p in run.prompts([Split.TRAIN, Split.VALIDATION], 60)]
    for sample in samples[7], samples[42]:
        context = run.backbone.encode_prompts([sample.prompt])
        decoded = Decoder(Autoregressive())(run.backbone, context, [sample.seed], run.sampling)
        assert torch.equal(sample.tokens.long(), decoded.tokens[0])
        assert torch.allclose(sample.hidden, decoded.hidden[:, 0].float(), rtol=1e-6)
    assert len({tuple(s.tokens.flatten().tolist()) for s in samples}) > 55


def test_without_guidance_only_the_conditional_stream_is_cached(make_run, tmp_path):
    run = make_run(tmp_path, "model.sampling.guidance=1.0", "cache.samples=20")
    stage.run(run)
    assert {tuple(sample.hidden.shape) for sample in all_samples(tmp_path / "cache")} == {(1, 16, 16)}


def test_the_manifest_pins_everything(cached, make_run):
    run = make_run(cached)
    manifest = ShardCache(cached / "cache").manifest()
    assert manifest["fingerprint"] == run.backbone.fingerprint
    assert manifest["norm_state"] == "pre"
    assert manifest["grid"] == [4, 4]
    assert manifest["sampling"] == {"guidance": 2.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    assert manifest["dtype"] == "float32"
    assert set(manifest["versions"]) == {"torch", "transformers", "ssd_train"}
    assert manifest["readout_error"] < 1e-9
    assert manifest["storage_error"]["relative_rms"] < 1e-6


def test_another_batch_size_alters_rounding_only(cached, make_run, tmp_path):
    stage.run(make_run(tmp_path, "cache.batch_size=7"))
    for a, b in zip(all_samples(cached / "cache"), all_samples(tmp_path / "cache"), strict=True):
        assert (a.index, a.prompt, a.seed) == (b.index, b.prompt, b.seed)
        assert torch.equal(a.tokens, b.tokens)
        assert torch.allclose(a.hidden, b.hidden, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", list(CacheDtype))
def test_the_error_of_the_cache_dtype_is_measured(make_run, tmp_path, dtype):
    """The manifest's figures, against states stored and read back one value at a time."""
    run = make_run(tmp_path, f"cache.dtype={dtype.value}", "cache.samples=60")
    backbone = run.backbone
    hidden = backbone.teacher_force(
        backbone.encode_prompts(["a red circle", "two blue squares"]), torch.randint(12, (2, 16))
    )
    stored = hidden.clone()
    if dtype is CacheDtype.int8:
        step = hidden.abs().amax(-1, keepdim=True) / 127
        stored = (hidden / step).round() * step
    else:
        stored = hidden.to(getattr(torch, dtype)).double()
    error = stage.storage_error(backbone, hidden, dtype, run.sampling)
    rms = ((stored - hidden).pow(2).mean() / hidden.pow(2).mean()).sqrt().item()
    p, q = (guided_probabilities(backbone.readout(x), run.sampling) for x in (hidden, stored))
    assert error["relative_rms"] == pytest.approx(rms, rel=0.01)
    assert error["total_variation"] == pytest.approx(1 - acceptance_rate(p, q).mean().item(), rel=0.05, abs=1e-7)
    low, high = {"float32": (0, 1e-7), "bfloat16": (1e-3, 3e-3), "int8": (3e-3, 1e-2)}[dtype.value]
    assert low <= error["relative_rms"] <= high
    stage.run(run)
    assert low <= ShardCache(run.cache_dir).manifest()["storage_error"]["relative_rms"] <= high


def test_images_are_encoded_and_teacher_forced(make_run, tmp_path):
    """Drawn scenes, cut to the backbone's 8x8 pixels: tokens are the VQ codes, states those of one pass over them."""
    run = make_run(tmp_path, "cache.source=images")
    stage.run(run)
    prompts = run.prompts([Split.TRAIN, Split.VALIDATION], 60)
    samples = all_samples(tmp_path / "cache")
    for prompt, sample in list(zip(prompts, samples, strict=True))[::13]:
        picture = ImageOps.fit(Image.fromarray(prompt.image()), (8, 8))
        codes = run.backbone.encode_pixels(torch.from_numpy(np.array(picture))[None])
        assert torch.equal(sample.tokens.long(), codes[0])
        forced = run.backbone.teacher_force(run.backbone.encode_prompts([prompt.text]), codes.flatten(1))
        assert torch.allclose(sample.hidden, forced[:, 0].float(), rtol=1e-5, atol=1e-6)
    assert ShardCache(run.cache_dir).manifest()["source"] == "images"
    with pytest.raises(CacheError, match=r"source: cache 'images', this run 'generated'"):
        stage.run(make_run(tmp_path))


def test_images_without_images_are_refused_before_anything(make_run, tmp_path):
    lines = tmp_path / "prompts.txt"
    lines.write_text("".join(f"prompt {i}\n" for i in range(100)))
    prompts = ["model.prompts._target_=ssd_train.prompts.DatasetPrompts", f"+model.prompts.path={lines}"]
    run = make_run(tmp_path, "cache.source=images", *prompts)
    with pytest.raises(ValueError, match=r"model.prompts gives no images; set model.prompts.image_column"):
        stage.check(run)


@pytest.fixture(scope="module")
def heads(make_run, tmp_path_factory):
    """An export of heads for the micro backbone that draft badly, but not the same everywhere."""
    run = make_run(tmp_path_factory.mktemp("heads"))
    spec = HeadSpec(run.backbone.width, run.backbone.vocabulary, 2, 2)
    torch.manual_seed(0)
    heads = Heads(spec)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    save_heads(run.output / "heads", heads, run.backbone, {"samples": 0, "steps": 0, "epochs": 0})
    return run.output / "heads"


@pytest.mark.parametrize("decoder", ["sjd_coupled", "ssd_coupled", "eagle", "mtp"])
def test_states_that_an_exact_decoder_leaves_are_teacher_forced_ones(make_run, tmp_path, heads, decoder):
    """And the manifest pins the decoder and its heads."""
    settings = [f"decoder=[ar,{decoder}]", f"cache.decoder={decoder}", f"decode.heads={heads}", "cache.samples=10"]
    run = make_run(tmp_path, *settings, "cache.shard_size=10", "stages=[cache]")
    stage.check(run)
    stage.run(run)
    samples = all_samples(tmp_path / "cache")
    assert len({tuple(sample.tokens.flatten().tolist()) for sample in samples}) > 8
    for sample in samples:
        context = run.backbone.encode_prompts([sample.prompt])
        forced = run.backbone.teacher_force(context, sample.tokens.long().flatten()[None])
        assert torch.allclose(sample.hidden, forced[:, 0].float(), rtol=1e-5, atol=1e-6)
    pinned = ShardCache(run.cache_dir).manifest()["decoder"]
    assert pinned["name"] == decoder
    assert pinned["settings"]["schedule"] == OmegaConf.to_container(run.cfg.decoder[decoder].schedule, resolve=True)
    assert pinned["heads"] == sha256(heads / "model.safetensors")
    for other in ["cache.decoder=null", "cache.decoder=ar", f"+decoder.{decoder}.common_noise=true"]:
        with pytest.raises(CacheError, match=r"decoder: cache \{.*'name': '"):
            stage.run(make_run(tmp_path, *settings, "cache.shard_size=10", "stages=[cache]", other))


@pytest.mark.parametrize("overrides, message", [
    (["decoder=[ar,ssd]", "cache.decoder=ssd"], "cache.decoder=ssd is lossy with these settings"),
    (["decoder=[ar,csd]", "cache.decoder=csd"], "cache.decoder=csd is lossy"),
    (["decoder=[ar]", "cache.decoder=ssd_coupled"], r"cache.decoder is ssd_coupled; expected one of decoder=\['ar'\]"),
    (["decoder=[ar]", "cache.decoder=ar", "cache.source=images"], "cache.source=images draws nothing"),
])  # fmt: skip
def test_a_decoder_that_must_not_fill_a_cache_is_refused_before_anything_is_loaded(
    make_run, tmp_path, monkeypatch, overrides, message
):
    monkeypatch.setattr(Run, "backbone", property(lambda run: pytest.fail("loaded")))
    with pytest.raises(ValueError, match=message):
        stage.check(make_run(tmp_path, *overrides))


def test_a_decoder_without_its_heads_is_refused_by_name(make_run, tmp_path):
    run = make_run(tmp_path, "decoder=[ar,ssd_coupled]", "cache.decoder=ssd_coupled")
    with pytest.raises(ValueError, match=r"cache.decoder=ssd_coupled, with decode.heads=None: .*heads"):
        stage.run(run)


# -- before it starts ---------------------------------------------------------------------------------------------


def test_bytes_and_time_are_said_before_anything_is_made(make_run, tmp_path, caplog, monkeypatch):
    """When the manifest and the first shard are written, the log already holds the estimate."""
    seen = []
    for name in "pin", "write":
        original = getattr(ShardCache, name)

        def noting(self, *args, original=original, name=name):
            seen.append((name, "60 samples to make" in caplog.text))
            return original(self, *args)

        monkeypatch.setattr(ShardCache, name, noting)
    with caplog.at_level(logging.INFO):
        stage.run(make_run(tmp_path))
    assert seen == [("pin", True), *[("write", True)] * 3]
    assert re.search(r"60 samples to make, 0\.00 GB \(\d+\.\d GB free\) and about \d+\.\d minutes", caplog.text)


def test_a_disk_that_cannot_hold_the_cache_is_refused_first(make_run, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(CacheError, match=r"60 samples need 0\.0 GB in .*; lower cache.samples, use cache.dtype=int8"):
        stage.run(make_run(tmp_path))
    assert contents(tmp_path / "cache") == {}


def test_too_few_samples_for_a_validation_prompt_are_refused_first(make_run, tmp_path):
    run = make_run(tmp_path, "cache.samples=6")
    with pytest.raises(ValueError, match=r"none of the first 6 prompts is a validation one; raise cache.samples"):
        stage.check(run)
    assert not (tmp_path / "cache").exists()
    stage.run(make_run(tmp_path, "cache.samples=6", "stages=[cache]"))


def test_states_after_the_norm_are_refused(make_run, tmp_path):
    """Negative control of the readout check: the commonest silent failure of draft-head trainers."""
    run = make_run(tmp_path)
    run.backbone.decoder.norm = run.backbone.output.norm
    with pytest.raises(CacheError, match=r"readout\(H\) differs from the model's own logits by .* largest logit"):
        stage.run(run)
    assert not ShardCache(run.cache_dir).manifest_path.exists()
    assert list(run.cache_dir.glob("*.tar")) == []


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_states_of_the_neighbouring_position_are_refused(make_run, tmp_path, dtype, monkeypatch):
    """And the true ones pass, in every dtype."""
    run = make_run(tmp_path, f"model.backbone.dtype={dtype}")
    prompts = run.prompts([Split.TRAIN], 4)
    error = stage._checks(run, prompts)["readout_error"]
    assert error <= stage.READOUT_TOLERANCE[run.backbone.dtype] / 3
    forced = run.backbone.teacher_force
    monkeypatch.setattr(run.backbone, "teacher_force", lambda *args: forced(*args).roll(1, 2))
    with pytest.raises(CacheError, match="does not capture the states before the final norm"):
        stage._checks(run, prompts)


# -- restarts -----------------------------------------------------------------------------------------------------


def command(arguments):
    return [sys.executable, "-m", "ssd_train", *arguments, "stages=[cache]"]


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_a_killed_run_is_completed_to_the_same_bytes(make_run, settings, tmp_path):
    """SIGKILL as soon as the first shards are there. The run after it makes the others, leaves these as they are, and
    does not mind what the killed one left half-written."""
    size = ["cache.samples=120", "cache.shard_size=4", "cache.batch_size=4"]
    uninterrupted = make_run(tmp_path / "uninterrupted", *size)
    stage.run(uninterrupted)

    killed = make_run(tmp_path / "killed", *size)
    process = subprocess.Popen(
        command(settings(tmp_path / "killed", *size)), cwd=tmp_path, env=environment(), stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while not (killed.cache_dir / "00001.json").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    cache = ShardCache(killed.cache_dir)
    done = [i for i in range(30) if cache.entry(i)]
    assert 2 <= len(done) < 30
    before = times(killed.cache_dir)
    (killed.cache_dir / f".{done[-1] + 1:05d}.tar.tmp-0123456789abcdef").write_bytes(b"half a shard")

    stage.run(killed)
    assert contents(killed.cache_dir) == contents(uninterrupted.cache_dir)
    after = times(killed.cache_dir)
    for name in ["manifest.json", *(f"{i:05d}.{suffix}" for i in done for suffix in ("tar", "json"))]:
        assert after[name] == before[name], name


@pytest.mark.slow
def test_several_processes_share_the_work(make_run, settings, tmp_path):
    """Three at once on one directory: each shard is made by one of them, and the bytes are those of one process."""
    size = ["cache.samples=120", "cache.shard_size=4", "cache.batch_size=4"]
    alone = make_run(tmp_path / "alone", *size)
    stage.run(alone)
    processes = [
        subprocess.Popen(
            command(settings(tmp_path / "together", *size, f"output={tmp_path}/{rank}")),
            cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    made = []
    for process in processes:
        out, _ = process.communicate(timeout=180)
        assert process.returncode == 0
        made.append(int(re.search(r"120 samples in 30 shards, (\d+) of them made now|$", out)[1] or 0))
    assert sum(made) == 30
    assert contents(tmp_path / "together/cache") == contents(alone.cache_dir)


def test_only_what_is_broken_is_made_again(cached, copied, make_run, caplog):
    """A shard cut short, one with a flipped bit, one gone: each alone is remade to the bytes it had."""
    directory = copied / "cache"
    good = contents(directory)

    def cut(path):
        path.write_bytes(path.read_bytes()[:-512])

    def flip(path):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    for damage, said in ((cut, True), (flip, True), (Path.unlink, False)):
        damage(directory / "00001.tar")
        before = times(directory)
        caplog.clear()
        stage.run(make_run(copied))
        assert contents(directory) == good
        after = times(directory)
        assert {name for name in good if after[name] != before.get(name)} == {"00001.tar", "00001.json"}
        assert ("00001.tar is incomplete, damaged or too short; it is made again" in caplog.text) == said


def test_a_complete_cache_is_left_alone(copied, make_run, caplog):
    before = times(copied / "cache")
    with caplog.at_level(logging.INFO):
        stage.run(make_run(copied))
    assert times(copied / "cache") == before
    assert "is complete: 60 samples in 3 shards" in caplog.text


def test_a_disk_that_fills_up_loses_nothing(cached, make_run, tmp_path):
    """On the second shard: a clear error, the first shard stays, and the next run goes on."""
    run, why = make_run(tmp_path), r"the disk is full while writing .*00001.tar.*run the same command again"
    with full_for("00001.tar"), pytest.raises(CacheError, match=why):
        stage.run(run)
    assert set(contents(run.cache_dir)) == {"00000.tar", "00000.json", "claims.lock", "manifest.json", "manifest.lock"}
    before = times(run.cache_dir)
    stage.run(run)
    assert contents(run.cache_dir) == contents(cached / "cache")
    assert times(run.cache_dir)["00000.tar"] == before["00000.tar"]


def test_a_state_that_is_nan_stops_the_run_with_its_prompt(make_run, tmp_path, monkeypatch):
    run = make_run(tmp_path)
    prompt = run.prompts([Split.TRAIN, Split.VALIDATION], 60)[23].text
    generate, shard = stage._generate, iter(range(100))

    def overflow(*args):
        tokens, hidden = generate(*args)
        if next(shard) == 2:  # the second shard's first batch
            hidden = hidden.clone()
            hidden[0, 3, 5, 0] = float("nan")
        return tokens, hidden

    monkeypatch.setattr(stage, "_generate", overflow)
    with pytest.raises(CacheError, match=re.escape(f"({prompt!r}) is NaN or infinite")):
        stage.run(run)
    assert ShardCache(run.cache_dir).entry(0, verify=True)
    assert set(contents(run.cache_dir)) == {"00000.tar", "00000.json", "claims.lock", "manifest.json", "manifest.lock"}


# -- another number of samples ------------------------------------------------------------------------------------


def test_more_samples_extend_a_cache_and_fewer_leave_it(cached, make_run, tmp_path):
    """50 samples, then 60: the last shard is too short and is remade, as if there had been 60 at once. Then 50 again:
    nothing is lost."""
    stage.run(make_run(tmp_path, "cache.samples=50"))
    before = times(tmp_path / "cache")
    stage.run(make_run(tmp_path))
    assert contents(tmp_path / "cache") == contents(cached / "cache")
    after = times(tmp_path / "cache")
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"00002.tar", "00002.json", "index.json"}
    stage.run(make_run(tmp_path, "cache.samples=50"))
    assert times(tmp_path / "cache") == after


# -- another cache ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override, line",
    [
        ("cache.dtype=int8", "dtype: cache 'float32', this run 'int8'"),
        ("cache.batch_size=20", "batch_size: cache 10, this run 20"),
        ("cache.shard_size=30", "shard_size: cache 20, this run 30"),
        ("model.sampling.guidance=3.0", "sampling: cache {'guidance': 2.0, .*this run {'guidance': 3.0"),
        ("model.sampling.top_k=5", "sampling: cache {.*'top_k': 0.*this run {.*'top_k': 5"),
        ("seed=1", "seed: cache 0, this run 1"),
        ("model.backbone.dtype=float32", "backbone_dtype: cache 'torch.float64', this run 'torch.float32'"),
    ],
)
def test_a_cache_made_with_something_else_is_refused_by_name(copied, make_run, override, line):
    before = contents(copied / "cache")
    with pytest.raises(CacheError, match=line) as caught:
        stage.run(make_run(copied, override, "stages=[cache]"))
    assert len(str(caught.value).splitlines()) == 3
    assert contents(copied / "cache") == before


def test_a_cache_of_other_weights_is_refused_by_name(copied, make_run, checkpoint, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    micro.janus_model(vocabulary=12, grid=(4, 4), scale=14.0, seed=1).save_pretrained(tmp_path / "weights")
    shutil.copy(tmp_path / "weights/model.safetensors", other)
    with pytest.raises(CacheError, match=r"fingerprint: cache '\w{16}', this run '\w{16}'"):
        stage.run(make_run(copied, f"model.backbone.checkpoint={other}"))


def test_a_changed_prompt_list_is_refused(copied, make_run):
    before = contents(copied / "cache")
    with pytest.raises(CacheError, match=r"00000.tar holds other prompts.*the prompt source has changed"):
        stage.run(make_run(copied, "+model.prompts.seed=1"))
    assert contents(copied / "cache") == before


def test_shards_without_their_manifest_are_refused(copied, make_run):
    """They may be of any settings: a copy that was cut off has tars, and no manifest yet."""
    (copied / "cache/manifest.json").unlink()
    before = contents(copied / "cache")
    for override in "seed=0", "model.sampling.guidance=3":
        with pytest.raises(CacheError, match=r"holds shards, but not the manifest.json .*: copy that here as well"):
            stage.run(make_run(copied, override))
    assert contents(copied / "cache") == before


def test_the_default_directory_tells_caches_apart(make_run, tmp_path):
    """Whatever decides a cache's bytes is in its name; how many samples, where it lies and the heads are not."""

    def name(*overrides):
        return make_run(tmp_path, "cache.dir=null", *overrides).cache_dir.as_posix()

    assert re.fullmatch(r"runs/cache/micro-\w{16}", name())
    for same in "cache.samples=50", "cache.verify=false", "head.k_vertical=1", "train.epochs=1", "++model.scorer=1":
        assert name(same) == name()
    others = ["seed=1", "cache.dtype=int8", "cache.batch_size=5", "model.sampling.guidance=3", "+model.prompts.seed=1"]
    assert len({name(), *map(name, others)}) == 1 + len(others)


def test_shards_are_webdataset_tars(cached):
    """Readable without this project: one safetensors and one JSON a sample."""
    import safetensors.torch
    import webdataset as wds

    sample = next(iter(wds.WebDataset(str(cached / "cache/00000.tar"), shardshuffle=False)))
    tensors = safetensors.torch.load(sample["safetensors"])
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {"tokens": (4, 4), "hidden": (2, 16, 16)}
    assert set(json.loads(sample["json"])) == {"index", "prompt", "seed", "backbone", "picture", "crc32"}

"""Training from a cache under a URL: the same as from the directory that was copied there."""

import shutil

import pytest
import torch
from serving import serving

from ssd_train.cache.shards import CacheError, ShardCache
from ssd_train.stages import cache, export, train

pytestmark = [
    pytest.mark.skipif(not shutil.which("curl"), reason="webdataset reads URLs with curl, which is not here"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


@pytest.fixture
def url(cached):
    with serving(cached / "cache") as url:
        yield url


def test_a_run_on_a_url_trains_the_same_heads_and_writes_nothing_there(cached, url, make_run, tmp_path, caplog):
    """Through a worker process; the cache stage finds everything there."""
    before = {path.name: path.stat().st_mtime_ns for path in (cached / "cache").iterdir()}
    weights = {}
    for place in url, f"{cached}/cache":
        output = tmp_path / str(len(weights))
        run = make_run(tmp_path, f"cache.dir={place}", f"output={output}", "train.epochs=1", "train.workers=1")
        with caplog.at_level("INFO"):
            cache.run(run)
        assert f"cache {place} is complete: 60 samples in 3 shards" in caplog.text
        train.run(run)
        export.run(run)
        weights[place] = torch.load(run.checkpoint, weights_only=True)["state_dict"]
    remote, local = weights.values()
    assert remote.keys() == local.keys()
    assert all(torch.equal(remote[key], local[key]) for key in local)
    assert {path.name: path.stat().st_mtime_ns for path in (cached / "cache").iterdir()} == before


@pytest.mark.parametrize(
    "override, message",
    [
        ("cache.samples=100", r"lacks shards \[3, 4\] of 5, and a URL is only read: make them with cache.dir="),
        ("cache.samples=61", r"lacks shards \[3\] of 4"),
        ("model.sampling.guidance=3.0", r"sampling: cache {'guidance': 2.0.* this run {'guidance': 3.0"),
        ("+model.prompts.seed=1", r"holds other prompts than model.prompts gives now"),
    ],
)
def test_what_a_url_lacks_or_does_not_fit_is_refused(url, make_run, tmp_path, override, message):
    with pytest.raises(CacheError, match=message):
        cache.run(make_run(tmp_path, f"cache.dir={url}", override))


def test_a_url_without_a_cache_is_refused(url, make_run, tmp_path):
    with pytest.raises(CacheError, match=r"nowhere/manifest.json cannot be read .* copied to where a URL leads"):
        cache.run(make_run(tmp_path, f"cache.dir={url}/nowhere"))


def test_a_copy_that_is_not_finished_is_refused(cached, make_run, tmp_path):
    """The index is to be copied last."""
    shutil.copytree(cached / "cache", tmp_path / "copy", ignore=shutil.ignore_patterns("index.json"))
    with serving(tmp_path / "copy") as url:
        with pytest.raises(CacheError, match=r"index\.json cannot be read"):
            cache.run(make_run(tmp_path, f"cache.dir={url}"))
        assert ShardCache(url).manifest()["grid"] == [4, 4]

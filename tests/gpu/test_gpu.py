"""Full-size backbones on a CUDA card, and on small ones the script that builds them."""

import dataclasses
import math

import full_size
import pytest
import torch

from ssd_train.backbones.kv_cache import KVCache


@pytest.fixture(scope="module")
def small():
    return full_size.run_all(small=True)


def test_the_script_runs_on_small_models(small):
    assert [result.model for result in small] == ["smoke_janus", "smoke_lumina", "smoke_emu3"]
    for result in small:
        assert full_size.check(result) == []
        assert result.block_error < 1e-4  # float32
        assert result.stale_error > 0.05
        ar, ssd = map(int, result.passes.split("/"))
        assert ar > ssd


def test_it_fails_where_a_repair_is_forgotten(small):
    forgotten = dataclasses.replace(small[0], rewind_error=small[0].stale_error)
    assert "smoke_janus: blocks differ by" in full_size.check(forgotten)[0]
    for figure in "block_error", "rewind_error", "stale_error":
        assert full_size.check(dataclasses.replace(small[0], **{figure: math.nan}))


def test_it_fails_where_a_kv_cache_keeps_what_was_written_first(monkeypatch):
    """A mistake in the rewinding itself, not in figures."""
    update = KVCache.update

    def first_only(self, key, value, layer, *args, **kwargs):
        held = self._layers[layer]
        before = held and [x.clone() for x in held]
        out = update(self, key, value, layer, *args, **kwargs)
        written = self.__dict__.setdefault("written", {}).setdefault(layer, set())
        slots = self._target.index.tolist()
        again = [slot for slot in slots if slot in written]
        for now, then in zip(self._layers[layer], before or (), strict=False):
            now[:, :, again] = then[:, :, again]
        written.update(slots)
        return out

    monkeypatch.setattr(KVCache, "update", first_only)
    broken = full_size.run(full_size.SMALL[0], "cpu")
    assert broken.block_error < 1e-4
    assert full_size.check(broken)


def test_its_table_has_a_row_a_model(small):
    lines = full_size.table(small).splitlines()
    assert len(lines) == 4
    assert "over_floor" in lines[0]
    assert lines[3].split()[0] == "smoke_emu3"


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason=f"needs a CUDA device of about 40 GB; torch {torch.__version__} finds none"
)
def test_full_size(capsys):
    results = full_size.run_all(small=False)
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name()}\n{full_size.table(results)}")
    assert [line for result in results for line in full_size.check(result)] == []
    assert all(result.peak_gb < 1.25 * result.planned_gb for result in results)

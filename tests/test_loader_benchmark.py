"""The benchmark of the loader: its command line, at a size that a test can write."""

import json
import sys

import pytest

from ssd_train import loader_benchmark as benchmark

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


@pytest.mark.parametrize("dtype, workers", [("int8", 1), ("bfloat16", 0)])
def test_the_last_line_says_what_was_measured(tmp_path, monkeypatch, capsys, dtype, workers):
    """Without checkpoint and cache; nothing stays."""
    monkeypatch.setattr(benchmark.tempfile, "tempdir", str(tmp_path))
    command = [
        "+model=janus_pro_7b", "model.backbone.checkpoint=nowhere", "model.architecture.vision_config.image_size=64",
        "model.architecture.text_config.hidden_size=64", "model.architecture.text_config.num_attention_heads=4",
        "model.architecture.text_config.num_key_value_heads=4", f"cache.dtype={dtype}", f"train.workers={workers}",
        "train.batch_size=4",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["loader_benchmark", *command, "--rounds", "2"])
    benchmark.main()
    *_, text, last = capsys.readouterr().out.splitlines()
    assert "reads plainly" in text
    found = json.loads(last)
    assert found.keys() == {
        "model", "dtype", "workers", "samples_per_second", "megabytes_per_second", "of_plain_read"
    }  # fmt: skip
    assert (found["model"], found["dtype"], found["workers"]) == ("janus_pro_7b", dtype, workers)
    assert found["samples_per_second"] > 0
    stored = 2 * 16 * 64 * {"int8": 1, "bfloat16": 2}[dtype]
    assert found["megabytes_per_second"] >= found["samples_per_second"] * stored / 1e6
    assert found["of_plain_read"] > 0
    assert list(tmp_path.iterdir()) == []

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, JanusForConditionalGeneration, JanusVQVAE

from ssd_train.backbones.janus import Janus
from ssd_train.tiny import sampler, train, train_vq
from ssd_train.tiny.scenes import GRID
from ssd_train.tiny.tokenizer import BOI, build_tokenizer, encode_prompts, unconditional

TINY = Path(__file__).parents[2] / "data" / "tiny"


@pytest.fixture(scope="module")
def shipped():
    model, info = JanusForConditionalGeneration.from_pretrained(TINY, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval(), AutoTokenizer.from_pretrained(TINY)


def call(monkeypatch, module, **options) -> None:
    """Run a script's `main` with command line options."""
    argv = [w for k, v in options.items() for w in ("--" + k.replace("_", "-"), str(v))]
    monkeypatch.setattr(sys, "argv", ["x", *argv])
    module.main()


COMMON = {"batch": 2, "width": 32}
SHORT = {
    **COMMON, "layers": 1, "heads": 2, "ff": 48,
    "steps": 2, "minutes": 100, "held_out": 1, "every": 1, "grid_minutes": 100,
}  # fmt: skip


@pytest.fixture
def short_run(tmp_path, monkeypatch):
    """A few steps of both scripts, as from the command line; the folders they wrote."""
    vq, out, log = tmp_path / "vq", tmp_path / "tiny", tmp_path / "log"
    call(monkeypatch, train_vq, **COMMON, out=vq, steps=4, images=8, held_out=4, free=2, every=2)
    call(monkeypatch, train, **SHORT, vq=vq, out=out, grids=log)
    return vq, out, log


def test_short_run_reloads(short_run):
    vq, out, log = short_run
    rows = json.loads((log / "train.json").read_text())["log"]
    assert len(rows) == 2
    assert all(np.isfinite(r["cond"]) and r["cond"] > 0 for r in rows)
    model, info = JanusForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.float32
    expected = JanusVQVAE.from_pretrained(vq).state_dict()
    for name, value in model.model.vqmodel.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    assert not [p for p in out.parent.iterdir() if p.name.startswith(".")]


def test_a_run_goes_on_to_a_wider_grid(short_run, tmp_path, monkeypatch):
    """From another run's weights and tokenizer; the adapter finds the grid in the checkpoint."""
    _, init, _ = short_run
    wide = tmp_path / "wide"
    options = SHORT | {"steps": 1, "every": 2}  # no evaluation
    call(monkeypatch, train, **options, init=init, columns=24, out=wide, grids=tmp_path / "log2")
    old, new = (JanusForConditionalGeneration.from_pretrained(folder).state_dict() for folder in (init, wide))
    assert old.keys() == new.keys()
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert not [name for name in changed if "vqmodel" in name or "vision_model" in name]
    assert [name for name in changed if "language_model" in name]
    for folder, columns in {init: GRID, wide: 24}.items():
        backbone = Janus.load(str(folder), dtype="float32")
        assert (backbone.grid.height, backbone.grid.width) == (GRID, columns)
        tokens = torch.randint(512, (2, GRID, columns))
        pixels = backbone.decode_pixels(tokens)
        assert pixels.shape == (2, 4 * GRID, 4 * columns, 3)
        assert backbone.encode_pixels(pixels).shape == tokens.shape


def test_training_from_nothing_needs_a_tokenizer(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, train, out="nowhere")
    assert "expected --vq, or --init" in capsys.readouterr().err


def test_prompt_format(shipped):
    _, tokenizer = shipped
    ids, mask = encode_prompts(tokenizer, ["a circle", "a red circle left of a blue square"])
    assert tokenizer.unk_token_id not in ids
    words = " ".join(tokenizer.convert_ids_to_tokens(ids[0][mask[0]]))
    assert words == "<|begin_of_sentence|> <|User|> : a circle <|Assistant|> : <begin_of_image>"
    assert mask[1].all()
    assert not mask[0][:6].any()
    dropped = unconditional(tokenizer, ids)
    boi = tokenizer.convert_tokens_to_ids(BOI)
    kept = (ids == tokenizer.bos_token_id) | (ids == boi)
    assert (dropped[kept] == ids[kept]).all()
    assert (dropped[~kept] == tokenizer.pad_token_id).all()
    fresh, _ = encode_prompts(build_tokenizer(), ["a circle", "a red circle left of a blue square"])
    assert (fresh == ids).all()


def test_left_padding_changes_nothing(shipped):
    model, tokenizer = shipped
    tokens = torch.randint(512, (1, GRID * GRID), generator=torch.Generator().manual_seed(0))
    losses = []
    for length in (8, 14):
        ids, mask = encode_prompts(tokenizer, ["a circle"], length)
        full = torch.nn.functional.pad(mask, (0, GRID * GRID - 1), value=True)
        attend, at = sampler.attention_mask(full), sampler.positions(full)
        with torch.no_grad():
            losses.append(train.token_losses(model, ids, tokens, attend, at))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)


def test_sampler_agrees_with_generate(shipped):
    """At temperature 0 the batched sampler and transformers' own loop draw one image."""
    model, tokenizer = shipped
    captions = ["a red circle"]
    ours = sampler.sample(model, tokenizer, captions, 3.0, 1e-6, torch.Generator().manual_seed(0))
    ids, mask = encode_prompts(tokenizer, captions)
    theirs = model.generate(
        ids, attention_mask=mask.long(), generation_mode="image", do_sample=False, guidance_scale=3.0
    )
    assert (ours == theirs).float().mean() > 0.95


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (32, 32)])
def test_muon_in_float32_steps_as_torch_does(shape):
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(shape))
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimizers = [
        train.Muon([ours], lr=0.1),
        torch.optim.Muon([theirs], lr=0.1, momentum=0.95, weight_decay=0.01),
    ]
    for _ in range(3):
        gradient = torch.randn(shape)
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02)  # theirs rounds to bfloat16


def test_shipped_folder_is_small():
    for folder in TINY, TINY / "heads":
        assert sum(f.stat().st_size for f in folder.iterdir() if f.is_file()) <= 15e6

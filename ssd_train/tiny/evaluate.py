"""Measure a tiny backbone: tokenizer, losses, checker, and the scene score at several guidance scales.

Writes `summary.json` into its folder.

    python -m ssd_train.tiny.evaluate data/tiny --grid runs/tiny.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, JanusForConditionalGeneration

from .checker import score
from .sampler import columns_of
from .scenes import CATEGORIES, PATCH, render, sample_scene
from .train import evaluate, make_batch, sample_and_score, save_grid, token_losses
from .train_vq import decode, encode
from .train_vq import evaluate as evaluate_vq


def measure(
    folder: Path, n: int, guidance: list[float], grid: Path | None, seed: int, temperature: float = 1.0
) -> dict:
    """The figures of `folder`'s README; n is the number of images behind each."""
    model = JanusForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer, vq, columns = AutoTokenizer.from_pretrained(folder), model.model.vqmodel, columns_of(model)
    rng = np.random.default_rng(seed)
    scenes = [sample_scene(rng, CATEGORIES[i % len(CATEGORIES)], width=columns * PATCH) for i in range(n)]
    images, captions = np.stack([render(s, rng) for s in scenes]), [s.caption for s in scenes]
    # Moved on by one, every caption meets an image of another category.
    swapped = captions[1:] + captions[:1]
    parts = {**dict(model.model.named_children()), "total": model}
    out = {
        "parameters": {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()},
        "vq": evaluate_vq(vq, images),
        "checker": {
            "renders": score(images, captions)["overall"],
            "reconstructions": score(decode(vq, encode(vq, images)), captions)["overall"],
            "swapped_captions": score(images, swapped)["overall"],
        },
        "nats_per_token": evaluate(
            token_losses,
            model,
            tokenizer,
            [make_batch(rng, vq, tokenizer, 32, columns=columns) for _ in range(-(-n // 32))],
        ),
        "score": {},
    }
    for scale in guidance:
        images, captions, out["score"][str(scale)] = sample_and_score(model, tokenizer, n, scale, seed, temperature)
        print(scale, json.dumps(out["score"][str(scale)]), flush=True)
        if grid is not None:
            save_grid(images[:48], captions, grid.with_stem(f"{grid.stem}-{scale}"))
    return out


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=192)
    parser.add_argument("--guidance", type=float, nargs="*", default=[1.5, 2.0, 3.0, 4.0, 5.0])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--grid", type=Path, help="PNG of samples; the guidance scale is added to its name")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    torch.set_num_threads(2)
    summary = measure(args.folder, args.images, args.guidance, args.grid, args.seed, args.temperature)
    (args.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()

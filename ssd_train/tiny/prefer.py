"""Train a tiny backbone on its own images: the ones the checker calls right against the ones it calls wrong.

    python -m ssd_train.tiny.prefer --init runs/tiny --out data/tiny --minutes 20.5

What the captions say is a few nats of an image's 580, so the plain loss hardly sees whether an object too many was
drawn. Here the backbone draws captions of the training split as the decoders will, guided, and the loss prefers its
right images to its wrong ones (DPO, against the weights that drew them). The plain loss on fresh scenes stays beside
it and keeps textures and entropy what they were.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import JanusForConditionalGeneration

from ssd_train.prompts import Split, split_of

from .checker import MIN_CHROMA, check_batch
from .sampler import sample
from .scenes import CATEGORIES, PATCH, sample_requirement
from .tokenizer import build_tokenizer, encode_prompts, unconditional
from .train import batch_losses, make_batch, save, token_losses
from .train_vq import decode

# Captions drawn the more, the more of them go wrong.
MIX = dict(zip(CATEGORIES, (1, 1, 4, 4, 4, 2), strict=True))


def draw_captions(rng: np.random.Generator, n: int) -> tuple[list[str], np.ndarray]:
    """n captions of the training split, and their categories."""
    weights = np.array(list(MIX.values()))
    categories = rng.choice(list(MIX), n, p=weights / weights.sum())
    captions = []
    for category in categories:
        while split_of(caption := sample_requirement(rng, str(category)).text()) is not Split.TRAIN:
            pass
        captions.append(caption)
    return captions, categories


def near_objects(images: np.ndarray) -> torch.Tensor:
    """bool [N,L]: the tokens whose patch, or one beside it, has an object's colours. To judge only these spares the
    preference the noise of the background's tokens."""
    saturated = torch.from_numpy(np.ptp(images.astype(int), axis=-1) > MIN_CHROMA).float()[:, None]
    patches = F.max_pool2d(F.max_pool2d(saturated, PATCH), 3, stride=1, padding=1)
    return patches.flatten(1).bool()


def pairs(rng: np.random.Generator, right: np.ndarray, categories: np.ndarray) -> np.ndarray:
    """int64 [P,2]: as many pairs of a right and a wrong image of one category as there are of the rarer kind."""
    out = []
    for category in sorted(set(categories)):
        of = [rng.permutation(np.flatnonzero((categories == category) & (right == r))) for r in (True, False)]
        out += list(zip(*of, strict=False))
    return rng.permutation(np.array(out, np.int64).reshape(-1, 2))


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    rng, generator = np.random.default_rng(args.seed), torch.Generator().manual_seed(args.seed)
    model = JanusForConditionalGeneration.from_pretrained(args.init)
    tokenizer, vq = build_tokenizer(), model.model.vqmodel.eval()
    guidance, temperature = model.generation_config.guidance_scale, model.generation_config.temperature
    m = model.model
    parts = (m.language_model, m.generation_embeddings, m.generation_aligner, m.generation_head)
    trained = [p for part in parts for p in part.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0)
    began, steps, nlls = time.time(), 0, []
    recent = {c: deque(maxlen=args.window) for c in CATEGORIES}
    while (done := (time.time() - began) / 60 / args.minutes) < 1:
        captions, categories = draw_captions(rng, args.images)
        drawn = [
            sample(model, tokenizer, captions[i : i + 48], guidance, temperature, generator)
            for i in range(0, args.images, 48)
        ]
        tokens, before = (torch.cat(t) for t in zip(*drawn, strict=True))
        images = decode(vq, tokens)
        right, judged = check_batch(images, captions), near_objects(images)
        for category, r in zip(categories, right, strict=True):
            recent[category].append(r)
        ids, mask = encode_prompts(tokenizer, captions)
        chosen = np.concatenate([pairs(rng, right, categories) for _ in range(args.epochs)])
        for pair in np.split(chosen, range(args.batch, len(chosen), args.batch)):
            optimizer.param_groups[0]["lr"] = args.lr * min(1, (steps + 1) / 5, (1 - done) / (1 - args.decay_from))
            real = make_batch(rng, vq, tokenizer, args.batch)
            drop = torch.from_numpy(rng.uniform(size=(args.batch, 1)) < 0.1)
            real_ids = torch.where(drop, unconditional(tokenizer, real.ids), real.ids)
            own = torch.from_numpy(pair.T.reshape(-1))
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                losses = batch_losses(
                    token_losses,
                    model,
                    torch.cat([real_ids, ids[own]]),
                    torch.cat([real.mask, mask[own]]),
                    torch.cat([real.tokens, tokens[own]]),
                )
            gain = ((-losses[args.batch :] - before[own]) * judged[own]).sum(1)
            good, bad = gain.chunk(2)
            nll = losses[: args.batch].mean()
            (nll + args.weight * F.softplus(-args.beta * (good - bad)).mean()).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            steps += 1
            nlls.append(nll.item())
        row = {"minutes": round((time.time() - began) / 60, 1), "steps": steps, "nll": round(np.mean(nlls[-15:]), 4)}
        row |= {c: round(float(np.mean(r)), 3) for c, r in recent.items() if r}
        row["overall"] = round(float(np.mean([np.mean(r) for r in recent.values() if r])), 3)
        print(json.dumps(row), flush=True)
        save(model, tokenizer, args.out)


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--init", type=Path, required=True, help="folder of the trained backbone")
    parser.add_argument("--out", type=Path, required=True, help="folder for the new one")
    parser.add_argument("--minutes", type=float, default=20, help="length of the run")
    parser.add_argument("--images", type=int, default=96, help="images drawn between updates")
    parser.add_argument("--batch", type=int, default=12, help="pairs a step, and fresh scenes beside them")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the pairs of what was drawn")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast, for a processor that has it")
    parser.add_argument("--lr", type=float, default=1.2e-4)
    parser.add_argument("--decay-from", type=float, default=0.5, help="share of the run before the decay")
    parser.add_argument("--beta", type=float, default=0.1, help="how soon a preference counts as learnt, per nat")
    parser.add_argument("--weight", type=float, default=0.3, help="of the preference beside the plain loss")
    parser.add_argument("--window", type=int, default=64, help="images behind each logged score")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()

"""Train the tiny text-to-image backbone: a small `JanusForConditionalGeneration` on captioned scenes.

    python -m ssd_train.tiny.train --vq runs/vq --out data/tiny --minutes 80
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m ssd_train.tiny.train ...   # shares each batch
    # On to a grid twice as wide, the one that the README measures:
    torchrun --nproc-per-node 2 -m ssd_train.tiny.train --init data/tiny --columns 32 --out runs/wide --minutes 42 \\
        --batch 16 --begin 0.4 --decay-from 0.5 --boost 2 --fade 0.5 0.75 --muon-lr 0.01 --adam-lr 1.5e-3 \\
        --bf16

`--bf16` pays only where `lscpu` lists avx512_bf16 or amx_bf16: emulated, a step takes fifteen times as long.

Single-threaded processes that meet once a step bear a busy machine far better than threads that meet in
every operation.

Scenes are drawn and tokenised on the fly, so no image is seen twice. Two things make a model of this size
heed its captions: training starts on calm backgrounds, where the objects are the only information, and the
loss of the tokens that overlap an object starts out weighted up. Both fade, so that the distribution learnt
in the end is the honest one. The log shows what the captions are worth: the held-out loss with and without.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import (
    GenerationConfig,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusVisionConfig,
    JanusVQVAE,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from .checker import score
from .sampler import attention_mask, positions, sample
from .scenes import CATEGORIES, GRID, PATCH, SIZE, object_patches, render, sample_scene
from .tokenizer import BOI, PROMPT_LENGTH, build_tokenizer, encode_prompts, unconditional
from .train_vq import decode, encode, vq_config

# Training draws the harder categories more often; evaluation takes all in turn.
MIX = dict(zip(CATEGORIES, (1, 1, 2, 2, 3, 2), strict=True))


def build_model(
    tokenizer: PreTrainedTokenizerFast, vq: JanusVQVAE, width: int, layers: int, heads: int, ff: int,
    columns: int = GRID,
) -> JanusForConditionalGeneration:  # fmt: skip
    """A fresh backbone around a trained VQ tokenizer, for images of `columns` tokens a row; the vision tower is a
    stub the class demands, and its number of tokens what tells the number of columns."""
    tokens = GRID * columns
    boi = tokenizer.convert_tokens_to_ids(BOI)
    ids = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = JanusConfig(
        text_config=LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=width, intermediate_size=ff, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads,
            max_position_embeddings=max(512, PROMPT_LENGTH + tokens),
            rope_parameters={"rope_type": "default", "rope_theta": 1000.0}, initializer_range=0.04,
            eos_token_id=None, **ids,
        ),
        vision_config=JanusVisionConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=1, mlp_ratio=1.0, image_size=SIZE,
            patch_size=PATCH, num_image_tokens=tokens, projection_dim=width,
        ),
        vq_config=vq_config(width),
        # Image *inputs* are not trained; their placeholder needs some id that no prompt contains.
        image_token_id=tokenizer.unk_token_id,
    )  # fmt: skip
    model = JanusForConditionalGeneration(config)
    model.model.vqmodel.load_state_dict(vq.state_dict())
    model.model.vqmodel.requires_grad_(False)
    with torch.no_grad():
        # Start where similar codes have similar embeddings, and text and image embeddings one scale.
        model.model.generation_embeddings.weight.copy_(vq.quantize.embedding.weight * 8**0.5)
        for linear in (model.model.generation_aligner.fc1, *model.model.generation_aligner.hidden_layers):
            linear.reset_parameters()
        model.get_input_embeddings().weight.normal_(0, 0.3)
        for layer in model.model.language_model.layers:
            layer.self_attn.o_proj.weight.mul_((2 * layers) ** -0.5)
            layer.mlp.down_proj.weight.mul_((2 * layers) ** -0.5)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.9, top_k=0, guidance_scale=2.0, max_length=PROMPT_LENGTH + tokens,
        generation_kwargs={"boi_token_id": boi}, **ids,
    )  # fmt: skip
    return model


def save(model: JanusForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write model (language model float16, VQ float32) and tokenizer; readers never see half a file."""
    state = {k: v if "vqmodel" in k else v.half() for k, v in model.state_dict().items()}
    del state["lm_head.weight"]  # tied to the text embedding
    temporary = folder.parent / f".{folder.name}.{os.getpid()}"
    model.save_pretrained(temporary, state_dict=state)
    tokenizer.save_pretrained(temporary)
    folder.mkdir(parents=True, exist_ok=True)
    for file in temporary.iterdir():
        os.replace(file, folder / file.name)
    temporary.rmdir()


@dataclass
class Batch:
    """Prompt ids int64 [B,14] and mask bool, image tokens int64 [B,L], object tokens bool [B,L]."""

    ids: torch.Tensor
    mask: torch.Tensor
    tokens: torch.Tensor
    on_object: torch.Tensor


def make_batch(
    rng: np.random.Generator, vq: JanusVQVAE, tokenizer: PreTrainedTokenizerFast, n: int, calm: float = 0.0,
    columns: int = GRID,
) -> Batch:  # fmt: skip
    """n fresh scenes over the category mix, a share `calm` of them with a weak background texture."""
    weights = np.array(list(MIX.values()))
    categories = rng.choice(list(MIX), n, p=weights / weights.sum())
    scenes = [sample_scene(rng, str(c), width=columns * PATCH) for c in categories]
    images = [render(s, rng, 0.4 * rng.uniform() if rng.uniform() < calm else 1.0) for s in scenes]
    on_object = torch.from_numpy(np.stack([object_patches(s).ravel() for s in scenes]))
    return Batch(*encode_prompts(tokenizer, [s.caption for s in scenes]), encode(vq, np.stack(images)), on_object)


def token_losses(
    model: JanusForConditionalGeneration, ids: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor,
    position_ids: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Negative log-likelihood in nats, float32 [B,L], of every image token."""
    prompt = model.get_input_embeddings()(ids)
    image = model.prepare_embeddings_for_image_generation(tokens[:, :-1])
    embeds = torch.cat([prompt, image], 1)
    hidden = model.model.language_model(
        inputs_embeds=embeds, attention_mask=mask, position_ids=position_ids, use_cache=False
    ).last_hidden_state
    logits = model.model.generation_head(hidden[:, ids.shape[1] - 1 :]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view(tokens.shape)


def batch_losses(
    fn, model: JanusForConditionalGeneration, ids: torch.Tensor, mask: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """`token_losses` (or its compiled form `fn`) of images under the prompts `ids` with `mask`; float32 [B,L]."""
    full = F.pad(mask, (0, tokens.shape[1] - 1), value=True)
    return fn(model, ids, tokens, attention_mask(full), positions(full))


@torch.no_grad()
def evaluate(fn, model, tokenizer: PreTrainedTokenizerFast, batches: Sequence[Batch]) -> dict[str, float]:
    """Held-out loss in nats with captions and without, and the difference; also on object tokens alone."""
    model.eval()
    with_, without, on = [], [], torch.cat([b.on_object for b in batches])
    for b in batches:
        with_.append(batch_losses(fn, model, b.ids, b.mask, b.tokens))
        without.append(batch_losses(fn, model, unconditional(tokenizer, b.ids), b.mask, b.tokens))
    c, u = torch.cat(with_), torch.cat(without)
    rows = {
        "cond": c.mean(), "uncond": u.mean(), "gain": (u - c).mean(), "object_cond": c[on].mean(),
        "object_gain": (u - c)[on].mean(), "gain_per_image": (u - c).sum(1).mean(),
    }  # fmt: skip
    return {k: round(v.item(), 4) for k, v in rows.items()}


def prompts(n: int, seed: int) -> list[str]:
    """n captions, the categories in turn."""
    rng = np.random.default_rng(seed)
    return [sample_scene(rng, CATEGORIES[i % len(CATEGORIES)]).caption for i in range(n)]


def sample_and_score(
    model: JanusForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, n: int, guidance: float,
    seed: int, temperature: float = 1.0,
) -> tuple[np.ndarray, list[str], dict[str, float]]:  # fmt: skip
    """n images uint8 [n,64,W,3], their captions, and the checker's score by category."""
    captions = prompts(n, seed)
    images = []
    for i in range(0, n, 96):
        generator = torch.Generator().manual_seed(seed + i)
        tokens = sample(model, tokenizer, captions[i : i + 96], guidance, temperature, generator)
        images.append(decode(model.model.vqmodel, tokens))
    images = np.concatenate(images)
    return images, captions, {k: round(v, 4) for k, v in score(images, captions).items()}


def save_grid(images: np.ndarray, captions: Sequence[str], path: Path, columns: int = 8) -> None:
    """A PNG of captioned images."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(images) // columns)
    size = 2 * columns * images.shape[2] / SIZE, 2.2 * rows
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, image, caption in zip(axes.flat, images, captions, strict=False):
        axis.imshow(image)
        axis.set_title(caption, fontsize=6)
    figure.tight_layout(pad=0.3)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` in float32. That one orthogonalises in bfloat16, and where the processor has to emulate it
    a step takes twice as long as the gradient of 32 images does."""

    def __init__(self, params: Sequence[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 1 - momentum)
                update = orthogonalise(p.grad.lerp(mean, momentum))
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(update, alpha=-lr * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonalise(x: torch.Tensor) -> torch.Tensor:
    """A matrix with the singular vectors of x and singular values near one, by Muon's Newton-Schulz iteration."""
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if tall else x


def optimizers(model: JanusForConditionalGeneration, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the decoder layers' matrices, AdamW for what remains of the trained path."""
    m = model.model
    matrices = [p for p in m.language_model.layers.parameters() if p.ndim == 2]
    path = (m.language_model, m.generation_embeddings, m.generation_aligner, m.generation_head)
    inside = {id(p) for p in matrices}
    rest = [p for part in path for p in part.parameters() if id(p) not in inside]
    return [
        Muon(matrices, lr=args.muon_lr),
        torch.optim.AdamW(rest, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def ramp(x: float, start: float, end: float) -> float:
    """0 before `start`, 1 after `end`, linear between."""
    return min(1.0, max(0.0, (x - start) / (end - start)))


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Mean over the processes, in place, as one message."""
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    parts = flat.div_(dist.get_world_size()).split([p.numel() for p in parameters])
    for p, g in zip(parameters, parts, strict=True):
        p.grad.copy_(g.view_as(p))


def share_of_run(began: float, args: argparse.Namespace) -> float:
    """How much of the schedule has passed, 0..1; by the first process's clock, so that all agree."""
    done = torch.tensor(args.begin + (1 - args.begin) * (time.time() - began) / 60 / args.minutes)
    if dist.is_initialized():
        dist.broadcast(done, 0)
    return done.item()


def train(args: argparse.Namespace) -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    rng = np.random.default_rng([args.seed, rank, round(1000 * args.begin)])
    per_process = args.batch // world
    init = JanusForConditionalGeneration.from_pretrained(args.init) if args.init else None
    vq = JanusVQVAE.from_pretrained(args.vq) if args.vq else init.model.vqmodel
    tokenizer, vq = build_tokenizer(), vq.eval()
    model = build_model(tokenizer, vq, args.width, args.layers, args.heads, args.ff, args.columns)
    if init is not None:
        model.load_state_dict(init.state_dict())
    elif rank == 0:
        save(model, tokenizer, args.out)
    args.grids.mkdir(parents=True, exist_ok=True)
    fn = torch.compile(token_losses, dynamic=False) if args.compile else token_losses
    held = np.random.default_rng(args.seed + 1)
    full = [make_batch(held, vq, tokenizer, args.batch, columns=args.columns) for _ in range(args.held_out)]
    calm = [make_batch(held, vq, tokenizer, args.batch, calm=1.0, columns=args.columns)]
    opts, began, seen = optimizers(model, args), time.time(), 0
    trained = [p for opt in opts for g in opt.param_groups for p in g["params"]]
    base = [opt.param_groups[0]["lr"] for opt in opts]
    step, losses, log, next_grid = 0, [], [], args.grid_minutes
    while (done := share_of_run(began, args)) < 1 and step != args.steps:
        model.train()
        # By wall clock, so that the schedule ends in time on a busy machine: warm-up, plateau, linear decay.
        scale = min(1.0, (step + 1) / 40, (1 - done) / (1 - args.decay_from))
        for opt, lr in zip(opts, base, strict=True):
            opt.param_groups[0]["lr"] = lr * scale
        texture = ramp(done, *args.calm)
        boost = 1 + (args.boost - 1) * (1 - ramp(done, *args.fade))
        batch = make_batch(rng, vq, tokenizer, per_process, calm=1 - texture, columns=args.columns)
        drop = torch.from_numpy(rng.uniform(size=(per_process, 1)) < 0.1)
        ids = torch.where(drop, unconditional(tokenizer, batch.ids), batch.ids)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            nll = batch_losses(fn, model, ids, batch.mask, batch.tokens)
        weight = torch.where(batch.on_object, boost, 1.0)
        ((nll * weight).sum() / weight.sum()).backward()
        if world > 1:
            average_gradients(trained)
        nn.utils.clip_grad_norm_(trained, 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + args.batch
        losses.append(nll.mean().item())
        if step % args.every == 0 and rank == 0:
            minutes = (time.time() - began) / 60
            row = {"step": step, "minutes": round(minutes, 1), "train": round(float(np.mean(losses)), 4)}
            row |= {"texture": round(texture, 2), "boost": round(boost, 2)}
            row |= evaluate(fn, model, tokenizer, full)
            if texture < 1:
                row |= {f"calm_{k}": v for k, v in evaluate(fn, model, tokenizer, calm).items()}
            losses = []
            if minutes >= next_grid:
                next_grid = minutes + args.grid_minutes
                save(model, tokenizer, args.out)
                images, captions, row["score"] = sample_and_score(model, tokenizer, 48, args.guidance, 7)
                save_grid(images, captions, args.grids / f"step{step:05d}.png")
            log.append(row)
            print(json.dumps(row), flush=True)
    if rank > 0:
        return
    save(model, tokenizer, args.out)
    (args.grids / "train.json").write_text(json.dumps({"images_seen": seen, "log": log}, indent=1))


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--vq", type=Path, help="folder of the trained VQ tokenizer; default: the one in --init")
    parser.add_argument("--out", type=Path, required=True, help="folder for the backbone")
    parser.add_argument("--grids", type=Path, default=Path("runs/tiny"), help="for sample grids and the log")
    parser.add_argument("--minutes", type=float, default=80, help="length of the run")
    parser.add_argument("--init", type=Path, help="continue from this folder's weights")
    parser.add_argument("--begin", type=float, default=0.0, help="with --init: where in the schedule to begin")
    parser.add_argument("--steps", type=int, default=-1, help="stop earlier, after this many steps")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--columns", type=int, default=GRID, help="image tokens in a row; rows are always 16")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--ff", type=int, default=704)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--decay-from", type=float, default=0.4, help="share of the run before the decay")
    parser.add_argument("--calm", type=float, nargs=2, default=(0.06, 0.3), help="the textures' ramp")
    parser.add_argument("--boost", type=float, default=3.0, help="initial weight of object tokens")
    parser.add_argument("--fade", type=float, nargs=2, default=(0.3, 0.75), help="the boost's ramp to 1")
    parser.add_argument("--held-out", type=int, default=3, help="held-out batches")
    parser.add_argument("--every", type=int, default=100, help="steps between evaluations")
    parser.add_argument("--grid-minutes", type=float, default=8, help="minutes between checkpoints")
    parser.add_argument("--guidance", type=float, default=2.0, help="for the sample grids")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast, for a processor that has it")
    parser.add_argument("--compile", action="store_true", help="torch.compile the loss")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.vq is None and args.init is None:
        parser.error("there is no VQ tokenizer: expected --vq, or --init")
    if args.columns < GRID:
        parser.error(f"--columns is {args.columns}; expected at least {GRID}, or four objects have no room")
    train(args)


if __name__ == "__main__":
    main()

"""Train the VQ tokenizer of the tiny backbone: a `JanusVQVAE`, 64x64 pixels <-> 16x16 tokens of 512 codes.

python -m ssd_train.tiny.train_vq --out runs/vq --steps 6000
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import JanusVQVAE, JanusVQVAEConfig

from .scenes import GRID, render, sample_scene


def vq_config(width: int) -> JanusVQVAEConfig:
    """The tokenizer's shape; `width` is the language model's, for the layers between the two."""
    return JanusVQVAEConfig(
        embed_dim=8, num_embeddings=512, latent_channels=64, base_channels=64, channel_multiplier=[1, 1, 1],
        num_res_blocks=0, num_patches=GRID, projection_dim=width, image_token_embed_dim=width,
    )  # fmt: skip


def to_model(images: np.ndarray | torch.Tensor) -> torch.Tensor:
    """uint8 [B,64,W,3] -> float32 [B,3,64,W] in -1..1."""
    return torch.as_tensor(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def to_images(pixels: torch.Tensor) -> np.ndarray:
    """float [B,3,64,W] in -1..1 -> uint8 [B,64,W,3]."""
    return ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()


def render_many(n: int, seed: int, calm: float = 0.0) -> np.ndarray:
    """uint8 [n,64,64,3] random scenes, a share `calm` of them with a weakened texture."""
    rng = np.random.default_rng(seed)
    return np.stack([
        render(sample_scene(rng), rng, rng.uniform() if rng.uniform() < calm else 1.0) for _ in range(n)
    ])  # fmt: skip


@torch.no_grad()
def encode(vq: JanusVQVAE, images: np.ndarray, batch: int = 128) -> torch.Tensor:
    """uint8 [N,64,4w,3] -> int64 tokens [N,16w]."""
    parts = [vq.encode(to_model(b)).image_tokens for b in np.split(images, range(batch, len(images), batch))]
    return torch.cat(parts).view(len(images), -1)


@torch.no_grad()
def decode(vq: JanusVQVAE, tokens: torch.Tensor, batch: int = 128) -> np.ndarray:
    """int64 tokens [N,16w] -> uint8 [N,64,4w,3]."""
    vq.quantize.quant_state_dims = [GRID, tokens.shape[1] // GRID]  # the class knows square grids only
    return np.concatenate([to_images(vq.decode(t)) for t in tokens.split(batch)])


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB over two uint8 arrays of one shape."""
    return 10 * math.log10(255**2 / np.mean((a.astype(np.float64) - b) ** 2))


class Codebook:
    """Unit-norm codes that follow their cluster means; codes out of use restart at latents of the batch.

    Janus looks codes up l2-normalised, and against unit-norm codes the nearest neighbour of a latent is the
    same whether the latent is normalised (as here) or not (as in `JanusVQVAE.encode`).
    """

    def __init__(self, weight: torch.nn.Parameter, decay: float = 0.98):
        self.weight, self.decay = weight.requires_grad_(False), decay
        self.use = torch.ones(len(weight))

    def start(self, z: torch.Tensor) -> None:
        self.weight.copy_(z[torch.randperm(len(z))[: len(self.weight)]])
        self.use.fill_(len(z) / len(self.weight))

    def update(self, z: torch.Tensor, index: torch.Tensor) -> None:
        """Move each code towards the mean of its latents z float32 [N,8], index int64 [N]."""
        count = torch.bincount(index, minlength=len(self.weight)).float()
        total = torch.zeros_like(self.weight).index_add_(0, index, z)
        moved = self.weight * (self.use * self.decay)[:, None] + total * (1 - self.decay)
        self.use.mul_(self.decay).add_(count, alpha=1 - self.decay)
        self.weight.copy_(F.normalize(moved, dim=-1))
        dead = (self.use < 0.05 * self.use.mean()).nonzero()[:, 0]
        self.weight[dead] = z[torch.randint(len(z), (len(dead),))]
        self.use[dead] = self.use.mean()


def evaluate(vq: JanusVQVAE, images: np.ndarray) -> dict[str, float]:
    """PSNR in dB, the share of codes in use, and the entropy of their marginal in nats."""
    vq.eval()
    tokens = encode(vq, images)
    share = torch.bincount(tokens.flatten(), minlength=vq.config.num_embeddings).float() / tokens.numel()
    entropy = -(share * share.clamp(min=1e-12).log()).sum()
    return {
        "psnr_db": round(psnr(decode(vq, tokens), images), 3),
        "codes_used": round((share > 0).float().mean().item(), 4),
        "code_entropy_nats": round(entropy.item(), 3),
    }


def train(args: argparse.Namespace) -> JanusVQVAE:
    torch.manual_seed(args.seed)
    data, held_out = render_many(args.images, args.seed, calm=0.2), render_many(args.held_out, args.seed + 1)
    vq = JanusVQVAE(vq_config(args.width)).train()
    for module in vq.modules():  # the class's own initialisation (0.02) starts slowly at this width
        if isinstance(module, torch.nn.Conv2d):
            module.reset_parameters()
    codebook = Codebook(vq.quantize.embedding.weight)
    params = [p for p in vq.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    rng, log, began = np.random.default_rng(args.seed), [], time.time()
    for step in range(args.steps):
        left = 1 - step / args.steps
        optimizer.param_groups[0]["lr"] = args.lr * min(1, (step + 1) / 50, 3 * left)
        x = to_model(data[rng.integers(len(data), size=args.batch)])
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            z = vq.quant_conv(vq.encoder(x)).float()
            z = F.normalize(z, dim=1)
            flat = z.permute(0, 2, 3, 1).reshape(-1, z.shape[1])
            commit = z.new_zeros(())
            # The first steps run unquantised, so that the codes can start at meaningful latents.
            if step >= args.free:
                if step == args.free:
                    codebook.start(flat.detach())
                index = (flat.detach() @ codebook.weight.T).argmax(1)
                q = codebook.weight[index].view(len(x), GRID, GRID, -1).permute(0, 3, 1, 2)
                commit = F.mse_loss(z, q)
                if step < args.freeze * args.steps:
                    codebook.update(flat.detach(), index)
                z = z + (q - z).detach()
            y = vq.decoder(vq.post_quant_conv(z)).float()
        # Saturated pixels are the objects: few, and what captions are about.
        weight = 1 + 1.5 * (x.amax(1, keepdim=True) - x.amin(1, keepdim=True))
        error = y - x
        loss = (weight * (error.abs() + error.square())).mean() + 0.25 * commit
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            row = {"step": step + 1, "loss": round(loss.item(), 5), **evaluate(vq, held_out)}
            row["seconds"] = round(time.time() - began)
            log.append(row)
            print(json.dumps(row), flush=True)
            vq.train()
            vq.save_pretrained(args.out)
    (args.out / "summary.json").write_text(json.dumps(log, indent=1))
    return vq.eval()


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the tokenizer")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--free", type=int, default=300, help="unquantised steps at the start")
    parser.add_argument("--freeze", type=float, default=0.85, help="share of the run after which codes stay")
    parser.add_argument("--images", type=int, default=16000)
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--width", type=int, default=256, help="the language model's width")
    parser.add_argument("--every", type=int, default=300)
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train(args)


if __name__ == "__main__":
    main()

"""The Lightning module: calls losses.py and heads.py, logs, and sets up the optimiser."""

import copy
import math
from typing import Any

import lightning as L
import torch
from torch import Tensor

from ssd_train import losses
from ssd_train.backbones.base import OutputLayers
from ssd_train.datamodule import Batch
from ssd_train.distributions import Sampling, acceptance_rate, guide, guided_probabilities
from ssd_train.draws import uniform
from ssd_train.grid import Grid
from ssd_train.heads import Direction, Heads, name, pairs, widen


class HeadModule(L.LightningModule):
    """Self-distils heads from cached states. Only the heads are in its checkpoints."""

    def __init__(self, heads: Heads, output: OutputLayers, grid: Grid, sampling: Sampling, settings: Any, steps: int,
                 seed: int):  # fmt: skip
        """``settings`` is config.HeadConfig; ``steps`` the length of the learning-rate schedule."""
        super().__init__()
        self.heads = heads
        # A copy: the backbone keeps its dtype. In a list: not a sub-module, not in checkpoints.
        self._frozen = [copy.deepcopy(output).float().requires_grad_(False)]
        self.grid, self.sampling, self.settings, self.steps, self.seed = grid, sampling, settings, steps, seed

    @property
    def output(self) -> OutputLayers:
        return self._frozen[0]

    def setup(self, stage: str) -> None:
        self.output.to(self.device)

    # -- steps --------------------------------------------------------------------------------------------------

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        terms = {}
        for direction, offset in self.heads.spec.offsets():
            for term, value in self.losses(batch, direction, offset).items():
                terms.setdefault(term, []).append(value)
        means = {term: torch.stack(values).mean() for term, values in terms.items()}
        weights = self.settings.loss
        loss = sum(value * weights.get(term, 1.0) for term, value in means.items())
        if not torch.isfinite(loss):
            raise ValueError(
                f"the loss is {loss.item()} at step {self.global_step}, samples {batch['index'].tolist()}; "
                "lower head.lr, or check these samples' states in the cache"
            )
        self.log("train/loss", loss, prog_bar=True)
        self.log_dict({f"train/{term}": value for term, value in means.items()})
        return loss

    def losses(self, batch: Batch, direction: Direction, offset: int) -> dict[str, Tensor]:
        """The unweighted terms in use for one head: scalars by name."""
        tokens = batch["tokens"]
        spec, weights = self.heads.spec, self.settings.loss
        _, target_tokens = pairs(tokens[..., None], self.grid, direction, offset)
        if spec.space == "token":
            source, _ = self._rectangles(self._chosen_stream(batch), tokens, direction, offset)
            logits = self.heads.logits(direction, offset, source, self.output.readout)
            return {"cross_entropy": losses.cross_entropy(logits, target_tokens[..., 0])}
        terms = {}
        if weights.smooth_l1:
            source, target = self._rectangles(self._chosen_stream(batch), tokens, direction, offset)
            terms["smooth_l1"] = losses.smooth_l1(self.heads(direction, offset, source), target / spec.state_scale)
        if weights.kl or weights.total_variation:
            p, q_logits = self._guided(batch, direction, offset)
            if weights.kl:
                terms["kl"] = losses.kl(q_logits, p)
            if weights.total_variation:
                terms["total_variation"] = losses.total_variation(q_logits, p)
        return terms

    def _chosen_stream(self, batch: Batch) -> Tensor:
        """Condition drop: each sample's conditional states, or with that probability its unconditional ones.
        [B, h, w, d]. A function of (seed, sample, step), so that a resumed run drops the same."""
        index = batch["index"]
        u = uniform(torch.full_like(index, self.seed), index, self.global_step)
        stream = (u < self.settings.condition_drop).long()
        return batch["hidden"][torch.arange(len(index), device=index.device), stream]

    def _rectangles(self, hidden: Tensor, tokens: Tensor, direction: Direction, offset: int) -> tuple[Tensor, Tensor]:
        """Inputs z and target states of one head from states [..., h, w, d] and tokens [..., h, w]."""
        z = widen(self.heads.inputs(hidden, self.output.embed(tokens)), self.heads.context(direction))
        return pairs(z, self.grid, direction, offset)[0], pairs(hidden, self.grid, direction, offset)[1]

    def _guided(self, batch: Batch, direction: Direction, offset: int) -> tuple[Tensor, Tensor]:
        """(p, draft logits), both guided and at the sampling temperature, [B, h', w', V]. The drafts' own top-k and
        top-p are left out: cut-off tokens would have no gradient."""
        hidden = batch["hidden"].transpose(0, 1)
        z, target = self._rectangles(hidden, batch["tokens"].expand(2, -1, -1, -1), direction, offset)
        p = guided_probabilities(self.output.readout(target), self.sampling)
        logits = guide(self.heads.logits(direction, offset, z, self.output.readout), self.sampling.guidance)
        return p, logits / (self.sampling.temperature or 1)

    @torch.no_grad()
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """By head: Smooth L1 (in token space cross-entropy) on the conditional stream, the acceptance rate
        sum_v min(p, q) on the guided distributions, and top-1 agreement. One row of the grid at a time, for the
        memory's sake."""
        hidden, tokens = batch["hidden"].transpose(0, 1), batch["tokens"].expand(2, -1, -1, -1)
        size = len(batch["index"])
        rates = []
        for direction, offset in self.heads.spec.offsets():
            z, target = self._rectangles(hidden, tokens, direction, offset)
            target_tokens = pairs(batch["tokens"][..., None], self.grid, direction, offset)[1][..., 0]
            rows: dict[str, list[Tensor]] = {}
            for y in range(z.shape[2]):
                logits = self.heads.logits(direction, offset, z[:, :, y], self.output.readout)
                p = guided_probabilities(self.output.readout(target[:, :, y]), self.sampling)
                q = guided_probabilities(logits, self.sampling)
                figures = {
                    "acceptance": acceptance_rate(p, q).mean(),
                    "top1": (p.argmax(-1) == q.argmax(-1)).float().mean(),
                }
                if self.heads.spec.space == "token":
                    figures["cross_entropy"] = losses.cross_entropy(logits[0], target_tokens[:, y])
                else:
                    predicted = self.heads(direction, offset, z[0, :, y])
                    figures["smooth_l1"] = losses.smooth_l1(predicted, target[0, :, y] / self.heads.spec.state_scale)
                for figure, value in figures.items():
                    rows.setdefault(figure, []).append(value)
            means = {figure: torch.stack(values).mean() for figure, values in rows.items()}
            rates.append(means["acceptance"])
            for figure, value in means.items():
                self.log(f"validation/{figure}/{name(direction, offset)}", value, batch_size=size, sync_dist=True)
        self.log("validation/acceptance", torch.stack(rates).mean(), batch_size=size, prog_bar=True, sync_dist=True)

    # -- optimiser ----------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> dict:
        s = self.settings
        fused = "mixed" not in str(self.trainer.precision)  # there, Lightning cannot clip gradients for a fused one
        optimizer = torch.optim.AdamW(
            self.heads.parameters(), lr=s.lr, betas=tuple(s.betas), weight_decay=s.weight_decay, fused=fused
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate(step, self.steps, s.warmup_steps, s.min_lr / s.lr)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def learning_rate(step: int, steps: int, warmup: int, floor: float) -> float:
    """Factor of the peak rate: linear warm-up to 1, then a cosine to ``floor`` at the last step."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

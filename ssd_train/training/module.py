"""The Lightning module: calls losses.py and heads.py, logs, and sets up the optimiser.

S streams (2, both of CFG, where a loss needs the guided distributions, else 1), B samples, h' x w' positions that have
a neighbour at a head's offset, d width.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from ssd_train.backbones.base import OutputLayers
from ssd_train.distributions import Sampling, acceptance_rate, guide, guided_probabilities
from ssd_train.draws import uniform
from ssd_train.grid import Grid
from ssd_train.heads.corrector import neighbours
from ssd_train.heads.predictors import Direction, Heads, name, pairs, widen
from ssd_train.training import losses
from ssd_train.training.corrections import Corrections, corrections, redraw
from ssd_train.training.datamodule import Batch
from ssd_train.training.teacher import Teacher


class Pairs(NamedTuple):
    """What one head predicts from, and what it should predict."""

    states: Tensor  # [S, B, h', w', d]
    tokens: Tensor  # [B, h', w']
    target: Tensor  # [S, B, h', w', d]
    target_tokens: Tensor  # [B, h', w']

    @classmethod
    def of(cls, states: Tensor, tokens: Tensor, grid: Grid, direction: Direction, offset: int) -> "Pairs":
        """From states [S, B, h, w, d] and tokens [B, h, w] of whole grids."""
        source, target = pairs(states, grid, direction, offset)
        source_tokens, target_tokens = pairs(tokens[..., None], grid, direction, offset)
        return cls(source, source_tokens[..., 0], target, target_tokens[..., 0])

    def row(self, y: int) -> "Pairs":
        """Of the h' rows this one."""
        at = slice(y, y + 1)
        return Pairs(self.states[:, :, at], self.tokens[:, at], self.target[:, :, at], self.target_tokens[:, at])


class HeadModule(L.LightningModule):
    """Self-distils heads from cached states. Only the heads are in its checkpoints."""

    def __init__(self, heads: Heads, output: OutputLayers, grid: Grid, sampling: Sampling, settings: Any, steps: int,
                 seed: int, teacher: Teacher | None = None):  # fmt: skip
        """``settings`` is config.HeadConfig; ``steps`` the length of the learning-rate schedule; ``teacher`` makes what
        a corrector learns from."""
        super().__init__()
        self.heads = heads
        # A copy: the backbone keeps its dtype. In a list: not a sub-module, not in checkpoints.
        self._frozen = [copy.deepcopy(output).float().requires_grad_(False)]
        self.grid, self.sampling, self.settings, self.steps, self.seed = grid, sampling, settings, steps, seed
        self.teacher = teacher
        if heads.corrector is not None:
            self._near = neighbours(grid, heads.spec.corrector.context)

    @property
    def output(self) -> OutputLayers:
        return self._frozen[0]

    def setup(self, stage: str) -> None:
        self.output.to(self.device)
        if self.heads.corrector is not None:
            self._near = self._near.to(self.device)

    def configure_model(self) -> None:
        """With train.strategy=fsdp spreads each head by itself over all processes; tensors keep their names."""
        if self.device_mesh is None or self.sharded:
            return
        # Not Lightning's mesh of two dimensions, whose process groups would have the default time-out.
        mesh = init_device_mesh(self.device.type, (self.trainer.world_size,))
        for modules in self.heads.parts().values():
            for module in modules:
                fully_shard(module, mesh=mesh, reshard_after_forward=True)
                # None but itself, which is there: checkpoint() calls heads in an order that FSDP would guess wrong.
                module.set_modules_to_backward_prefetch([module])
        fully_shard(self.heads, mesh=mesh)  # what they share; it has no weights of its own

    @property
    def sharded(self) -> bool:
        return isinstance(self.heads, FSDPModule)

    @contextmanager
    def gathered(self, direction: Direction, offset: int) -> Iterator[None]:
        """A sharded head that is called within is gathered once, however often, and in parts again afterwards."""
        modules = self.heads.parts()[name(direction, offset)]
        for module in modules if self.sharded else ():
            module.set_reshard_after_forward(False)
        yield
        for module in modules if self.sharded else ():
            module.set_reshard_after_forward(True)
            module.reshard()

    # -- steps --------------------------------------------------------------------------------------------------

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        weights, stream = self.settings.loss, self._stream(batch)
        # First: the heads' states may give back the batch.
        stale = None if self.heads.corrector is None else self._corrections(batch, self.global_step)
        guided = self.heads.spec.space == "latent" and bool(weights.kl or weights.total_variation)
        states = batch.states(None if guided else stream)
        terms: dict[str, list[Tensor]] = {}
        for direction, offset in self.heads.spec.offsets():
            at = Pairs.of(states, batch["tokens"], self.grid, direction, offset)
            # Made again in the backward pass: ten heads' graphs at a time do not fit a GPU at d = 4096.
            values = checkpoint(
                self.losses, at, stream, direction, offset, use_reentrant=False, preserve_rng_state=False
            )
            for term, value in values.items():
                terms.setdefault(term, []).append(value)
        means = {term: torch.stack(values).mean() for term, values in terms.items()}
        loss = sum(value * weights.get(term, 1.0) for term, value in means.items())
        if stale is not None:
            values = checkpoint(self.corrector_losses, stale, use_reentrant=False, preserve_rng_state=False)
            loss = loss + sum(value * self.settings.corrector.loss[term] for term, value in values.items())
            means |= {f"corrector_{term}": value for term, value in values.items()}
        if not torch.isfinite(loss):
            raise ValueError(
                f"the loss is {loss.item()} at step {self.global_step}, samples {batch['index'].tolist()}; "
                "lower head.lr, or check these samples' states in the cache"
            )
        self.log("train/loss", loss, prog_bar=True)
        self.log_dict({f"train/{term}": value for term, value in means.items()})
        return loss

    def losses(self, at: Pairs, stream: Tensor, direction: Direction, offset: int) -> dict[str, Tensor]:
        """The unweighted terms in use for one head, scalars by name. ``stream`` [B] is each sample's for Smooth L1,
        where there are two.

        KL and total variation are between the guided distributions at the sampling temperature. The drafts' own top-k
        and top-p are left out: cut-off tokens would have no gradient.
        """
        spec, weights = self.heads.spec, self.settings.loss
        predicted = self.predict(at, direction, offset)
        if spec.space == "token":
            logits = self.heads.logits(direction, offset, predicted[0], self.output.readout)
            return {"cross_entropy": losses.cross_entropy(logits, at.target_tokens)}
        terms = {}
        if weights.smooth_l1:
            target = _choose(at.target, stream) / spec.state_scale
            terms["smooth_l1"] = losses.smooth_l1(_choose(predicted, stream), target)
        return terms | self._between_distributions(predicted * spec.state_scale, at.target, weights)

    def _between_distributions(self, predicted: Tensor, target: Tensor, weights: Any) -> dict[str, Tensor]:
        """KL and total variation, where they have a weight, between the guided distributions of states [S, ..., d]."""
        if not (weights.kl or weights.total_variation):
            return {}
        p = guided_probabilities(self.output.readout(target), self.sampling)
        logits = guide(self.output.readout(predicted), self.sampling.guidance) / (self.sampling.temperature or 1)
        terms = {"kl": losses.kl, "total_variation": losses.total_variation}
        return {term: loss(logits, p) for term, loss in terms.items() if weights[term]}

    # -- the corrector ------------------------------------------------------------------------------------------

    def _corrections(self, batch: Batch, key: int) -> Corrections:
        """From as many of the batch's images as hold head.corrector.pairs positions, re-drawn by this key."""
        pairs = self.settings.corrector.pairs
        batch = batch.first(-(-pairs // self.grid.size))
        tokens, hidden = batch["tokens"], batch.states()
        with torch.no_grad():
            fed = redraw(hidden, tokens, batch["index"], (self.seed, key), self.output.readout, self.sampling)
            stale = self.teacher(batch["prompts"], fed)
        return corrections(stale, fed, hidden, tokens, self._near, pairs)

    def correct(self, at: Corrections) -> Tensor:
        """The corrected states [S, N, d]."""
        hidden = at.hidden
        if self.sharded and torch.is_grad_enabled():  # see predict()
            hidden = hidden + hidden.new_zeros(()).requires_grad_()
        return self.heads.corrector(hidden, at.left, at.fed, at.now, self.output.embed)

    def corrector_losses(self, at: Corrections) -> dict[str, Tensor]:
        """The unweighted terms in use, scalars by name; Smooth L1 on both streams."""
        weights, scale = self.settings.corrector.loss, self.heads.spec.state_scale
        predicted = self.correct(at)
        terms = {}
        if weights.smooth_l1:
            terms["smooth_l1"] = losses.smooth_l1(predicted / scale, at.target / scale)
        return terms | self._between_distributions(predicted, at.target, weights)

    def _corrector_figures(self, batch: Batch) -> dict[str, Tensor]:
        """How often stale drafts are accepted, as they are and corrected: of all that have a neighbour that differs, of
        those whose left neighbour does, and of the others."""
        at = self._corrections(batch, -1)
        p, stale, corrected = (
            guided_probabilities(self.output.readout(hidden), self.sampling)
            for hidden in (at.target, at.hidden, self.correct(at))
        )
        left = at.fed[:, 0] != at.now[:, 0]
        figures = {}
        for kind, q in ("stale", stale), ("corrected", corrected):
            rate = acceptance_rate(p, q)
            groups = {"": left | True, "_left_differs": left, "_left_is_the_same": ~left}
            figures |= {f"{kind}{group}": rate[chosen].mean() for group, chosen in groups.items() if chosen.any()}
        return figures

    def predict(self, at: Pairs, direction: Direction, offset: int) -> Tensor:
        """A head's predictions over the state scale [S, B, h', w', d]."""
        z = self.heads.inputs(at.states, self.output.embed(at.tokens).expand_as(at.states))
        if self.sharded and torch.is_grad_enabled():
            # By its inputs' gradients FSDP knows that a head is done, and parts with its weights and gradients; without
            # any it would keep those of all heads until the last one is.
            z = z + z.new_zeros(()).requires_grad_()
        return self.heads(direction, offset, widen(z, self.heads.context(direction)))

    def _stream(self, batch: Batch) -> Tensor:
        """Condition drop: 0 for a sample's conditional states, or with that probability 1 for its unconditional ones,
        [B]. A function of (seed, sample, step), so that a resumed run drops the same."""
        index = batch["index"]
        u = uniform(torch.full_like(index, self.seed), index, self.global_step)
        return (u < self.settings.condition_drop).long()

    @torch.no_grad()
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs each head's figures, and the acceptance rate's mean over heads."""
        size, rates, states = len(batch["index"]), [], batch.states()
        for direction, offset in self.heads.spec.offsets():
            whole = Pairs.of(states, batch["tokens"], self.grid, direction, offset)
            with self.gathered(direction, offset):
                figures = self._figures(whole, direction, offset)
            for figure, values in figures.items():
                mean = torch.stack(values).mean()
                self.log(f"validation/{figure}", mean, batch_size=size, sync_dist=True)
                if figure.startswith("acceptance"):
                    rates.append(mean)
        if self.heads.corrector is not None:
            for figure, value in self._corrector_figures(batch).items():
                self.log(f"validation/corrector/{figure}", value, batch_size=size, sync_dist=True)
        self.log("validation/acceptance", torch.stack(rates).mean(), batch_size=size, prog_bar=True, sync_dist=True)

    def _figures(self, whole: Pairs, direction: Direction, offset: int) -> dict[str, list[Tensor]]:
        """One head's by row of the grid: Smooth L1 (in token space cross-entropy) on the conditional stream, the
        acceptance rate sum_v min(p, q) on the guided distributions, and top-1 agreement. One row at a time, for the
        memory's sake."""
        scale = self.heads.spec.state_scale
        rows: dict[str, list[Tensor]] = {}
        for y in range(whole.tokens.shape[1]):
            at = whole.row(y)
            predicted = self.predict(at, direction, offset)
            logits = self.heads.logits(direction, offset, predicted, self.output.readout)
            p = guided_probabilities(self.output.readout(at.target), self.sampling)
            q = guided_probabilities(logits, self.sampling)
            figures = {
                "acceptance": acceptance_rate(p, q).mean(),
                "top1": (p.argmax(-1) == q.argmax(-1)).float().mean(),
            }
            if self.heads.spec.space == "token":
                figures["cross_entropy"] = losses.cross_entropy(logits[0], at.target_tokens)
            else:
                figures["smooth_l1"] = losses.smooth_l1(predicted[0], at.target[0] / scale)
            for figure, value in figures.items():
                rows.setdefault(f"{figure}/{name(direction, offset)}", []).append(value)
        return rows

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


def _choose(x: Tensor, stream: Tensor) -> Tensor:
    """Each sample's stream: x [S, B, ...] and stream [B] -> [B, ...]; the only one if S is 1."""
    return x[0] if len(x) == 1 else x[stream, torch.arange(len(stream), device=x.device)]


def learning_rate(step: int, steps: int, warmup: int, floor: float) -> float:
    """Factor of the peak rate: linear warm-up to 1, then a cosine to ``floor`` at the last step."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

"""Distillation losses, pure functions. q is the draft distribution, p the target. N any shape, V vocabulary."""

import torch.nn.functional as F
from torch import Tensor


def smooth_l1(predicted: Tensor, target: Tensor) -> Tensor:
    """Mean Smooth L1 between states [*N, d], both over the state scale (otherwise it is plain L1). Scalar."""
    return F.smooth_l1_loss(predicted, target)


def kl(q_logits: Tensor, p: Tensor) -> Tensor:
    """KL(p || q) in nats, averaged over N: draft logits and target distribution [*N, V]. Scalar."""
    log_q = q_logits.log_softmax(-1)
    return (p * (p.clamp_min(1e-30).log() - log_q)).sum(-1).mean()


def total_variation(q_logits: Tensor, p: Tensor) -> Tensor:
    """1 - sum_v min(p, q), the rate at which strict verification rejects: [*N, V] each. Scalar in [0, 1]."""
    return 1 - q_logits.softmax(-1).minimum(p).sum(-1).mean()


def cross_entropy(q_logits: Tensor, tokens: Tensor) -> Tensor:
    """-log q(token) in nats, averaged over N: draft logits [*N, V], tokens [*N] int64. Scalar."""
    return F.cross_entropy(q_logits.flatten(0, -2), tokens.flatten())

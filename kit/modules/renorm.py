"""Batch renormalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BatchRenorm(nn.Module):
    """Batch renormalisation (Ioffe 2017, algorithm 1) of the last dimension.

    In training ``y = weight ((x - mean) / std r + d) + bias`` with mean and deviation of the batch,
    and the constants ``r = clip(std / running_std)``, ``d = clip((mean - running_mean) /
    running_std)``; in evaluation the running statistics normalise. During ``warmup_steps`` r is 1
    and d is 0: batch normalisation.

    In TorchRL's ``BatchRenorm1d`` the warm-up continues: after two times ``warmup_steps`` it counts
    both corrections twice, after three times three times. Here it ends. Running statistics and the
    number of batches are buffers, which checkpoints hold.

    Args:
        features: size of the last dimension.
        momentum: weight of a batch in the running statistics.
        eps: added to variances.
        max_r: largest r; the smallest is its reciprocal.
        max_d: largest absolute d.
        warmup_steps: batches that are normalised by their own statistics alone.
    """

    running_mean: Tensor
    running_var: Tensor
    batches: Tensor

    def __init__(
        self,
        features: int,
        *,
        momentum: float = 0.01,
        eps: float = 1e-3,
        max_r: float = 3.0,
        max_d: float = 5.0,
        warmup_steps: int = 100_000,
    ) -> None:
        super().__init__()
        self.momentum, self.eps, self.warmup_steps = momentum, eps, warmup_steps
        self.max_r, self.max_d = max_r, max_d
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, value: Tensor) -> Tensor:
        """Normalise ``[..., features]``; in training, take the batch into the statistics."""
        running_std = (self.running_var + self.eps).sqrt()
        if not self.training:
            scale = self.weight / running_std
            return torch.addcmul(self.bias, value - self.running_mean, scale)
        batch = tuple(range(value.ndim - 1))
        mean = value.mean(batch)
        centred = value - mean
        var = centred.square().mean(batch)  # torch.var takes 25 times as long
        std = (var + self.eps).sqrt()
        with torch.no_grad():
            warm = self.batches < self.warmup_steps
            r = (std / running_std).clamp(1 / self.max_r, self.max_r)
            d = ((mean - self.running_mean) / running_std).clamp(-self.max_d, self.max_d)
            r, d = torch.where(warm, 1.0, r), torch.where(warm, 0.0, d)
            self.running_mean += self.momentum * (mean - self.running_mean)
            self.running_var += self.momentum * (var - self.running_var)
            self.batches += 1
        return torch.addcmul(d * self.weight + self.bias, centred, r / std * self.weight)

"""Behaviour cloning of choices."""

from __future__ import annotations

from tensordict import TensorDict, TensorDictBase
from torchrl import objectives


class LikelihoodBCLoss(objectives.BCLoss):
    """Behaviour cloning by likelihood, ``-log pi(a | s)`` (Pomerleau 1988).

    TorchRL's ``BCLoss`` compares choices with the sampled choice of a categorical actor.
    """

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return ``loss_bc``."""
        with self.actor_network_params.to_module(self.actor_network, preserve_module_state=False):
            policy = self.actor_network.get_dist(tensordict.copy())
        loss = -policy.log_prob(tensordict.get(self.tensor_keys.action))
        return TensorDict({"loss_bc": self._reduce_loss(loss, tensordict=tensordict)})

"""Recurrent networks that read nothing on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn.functional import linear
from torchrl.data import Unbounded
from torchrl.envs import TensorDictPrimer

from kit.steps import SettingError

RecurrentKind = Literal["lstm", "gru"]

_STATES = {
    "lstm": ["recurrent_state_h", "recurrent_state_c"],
    "gru": ["recurrent_state"],
}
"""Keys of the hidden state, as in TorchRL."""


class Recurrent(TensorDictModuleBase):
    """Hidden layers, then one LSTM or GRU layer; it writes ``features``.

    TorchRL's ``LSTMModule`` and ``GRUModule`` ask on the host whether an episode has begun, so they
    cannot be recorded. This module has PyTorch's weights and results, and multiplies the hidden
    state by 0 where ``is_init`` is true.

    Called with rows ``[num_envs]``, it makes one time step: it reads the hidden state
    ``[num_envs, 1, hidden_size]`` (zero where there is none) and writes the next one under
    ``("next", key)``. Called with sequences ``[sequences, steps]``, it begins each with the hidden
    state in its first row, and writes none.

    Args:
        in_keys: of the observations.
        network: from observations to a vector of ``out_features``; the hidden layers.
        kind: ``lstm`` or ``gru``.
        hidden_size: width of the recurrent layer.
        burn_in: steps at the beginning of each sequence after which gradients do not flow back.

    Attributes:
        out_features: width of ``features``.
        cell: PyTorch's layer, whose weights are used.
    """

    def __init__(
        self,
        in_keys: Sequence[Any],
        network: nn.Module,
        kind: RecurrentKind = "lstm",
        hidden_size: int = 64,
        burn_in: int = 0,
    ) -> None:
        super().__init__()
        self.network, self.kind, self.burn_in = network, kind, burn_in
        width = int(network.out_features)  # type: ignore[arg-type]
        layer: Any = nn.LSTM if kind == "lstm" else nn.GRU
        self.cell = layer(width, hidden_size, batch_first=True)
        for name, parameter in self.cell.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)
        if kind == "lstm":  # forget gates start open (Jozefowicz et al. 2015, section 2.2)
            forget: Any = self.cell.bias_ih_l0
            nn.init.ones_(forget[hidden_size : 2 * hidden_size])
        self.out_features = hidden_size
        self._observed, self.states = list(in_keys), _STATES[kind]
        self.in_keys = [*in_keys, *self.states, "is_init"]
        self.out_keys = ["features", *(("next", key) for key in self.states)]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``features``, and the next hidden state of rows."""
        value = self.network(*map(tensordict.get, self._observed))
        is_sequence = tensordict.ndim == 2
        if not is_sequence:
            value = value.unsqueeze(1)
        keep = torch.ones_like(value[..., :1])
        starts = tensordict.get("is_init", None)
        if starts is not None:
            keep = (~starts).reshape(keep.shape).to(value.dtype)
        hidden = [self._first(tensordict.get(key, None), value) for key in self.states]
        features, hidden = self._unrolled(value, keep, hidden)
        if is_sequence:
            return tensordict.set("features", features)
        for key, state in zip(self.states, hidden):
            tensordict.set(("next", key), state.unsqueeze(1))
        return tensordict.set("features", features.squeeze(1))

    def _first(self, state: Tensor | None, value: Tensor) -> Tensor:
        """Hidden state before the first step, ``[rows, hidden_size]``."""
        if state is None:
            return value.new_zeros(value.shape[0], self.out_features)
        return state.reshape(value.shape[0], -1, self.out_features)[:, 0]

    def _unrolled(
        self, value: Tensor, keep: Tensor, hidden: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Features ``[rows, steps, hidden_size]`` and the last hidden state."""
        cell = self.cell
        step = _lstm_step if self.kind == "lstm" else _gru_step
        inputs = linear(value, cell.weight_ih_l0, cell.bias_ih_l0).unbind(1)
        outputs = []
        for number, (seen, kept) in enumerate(zip(inputs, keep.unbind(1))):
            if number and number == self.burn_in:
                hidden = [state.detach() for state in hidden]
            hidden = [state * kept for state in hidden]
            recurrence = linear(hidden[0], cell.weight_hh_l0, cell.bias_hh_l0)
            hidden = step(seen, recurrence, *hidden)
            outputs.append(hidden[0])
        return torch.stack(outputs, dim=1), hidden

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """First hidden state, for collectors of TorchRL, which need it as a transform."""
        spec = Unbounded((1, self.out_features))
        return TensorDictPrimer({key: spec.clone() for key in self.states}, expand_specs=True)

    def body_parameters(self) -> list[nn.Parameter]:
        """All parameters: there is no output layer."""
        return list(self.parameters())


def _lstm_step(seen: Tensor, recurrence: Tensor, h: Tensor, c: Tensor) -> list[Tensor]:
    """Hidden state and cell after a step (Hochreiter and Schmidhuber 1997, with forget gate)."""
    i, f, g, o = (seen + recurrence).chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return [o.sigmoid() * c.tanh(), c]


def _gru_step(seen: Tensor, recurrence: Tensor, h: Tensor) -> list[Tensor]:
    """Hidden state after a step (Cho et al. 2014, as PyTorch has it)."""
    (seen_r, seen_z, seen_n), (r, z, n) = seen.chunk(3, dim=-1), recurrence.chunk(3, dim=-1)
    r, z = (seen_r + r).sigmoid(), (seen_z + z).sigmoid()
    n = (seen_n + r * n).tanh()
    return [n + z * (h - n)]


def check_sequences(sequence_length: int | None, burn_in: int = 0) -> None:
    """Refuse sequences without a step to train on after ``burn_in``, or with one step alone."""
    if sequence_length is None or sequence_length < 2:
        why = "leaves a recurrent network single steps, through which it learns to keep nothing"
        hint = "it is a setting of the kit's own steps, not of those in another library's words"
        raise SettingError("steps.sequence_length", sequence_length, why, [16], hint)
    if burn_in >= sequence_length:
        why = f"leaves no step of a sequence of {sequence_length} to train on"
        raise SettingError("burn_in", burn_in, why, [sequence_length // 2, 0])

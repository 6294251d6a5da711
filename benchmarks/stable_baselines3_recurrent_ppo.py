"""sb3-contrib's RecurrentPPO with the settings of ``reference_recurrent_ppo.py``.

It shares no code with rlsrl. A hidden layer of 64 units extracts features, and policy and value share the LSTM behind
it. It trains on the parts of episodes in a minibatch, padded to the longest.

    python benchmarks/stable_baselines3_recurrent_ppo.py --env-id CartPole-without-velocities --report
"""

from __future__ import annotations

from typing import Any

import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3_ppo import main, parser_of

SIZE = 64


class HiddenLayer(BaseFeaturesExtractor):
    """A dense layer with tanh."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__(observation_space, SIZE)
        (num_inputs,) = observation_space.shape
        self.layers = torch.nn.Sequential(torch.nn.Linear(num_inputs, SIZE), torch.nn.Tanh())

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.layers(observation)
        return features


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--recurrent", choices=["lstm"], required=True, help="it has no other recurrent layer")
    parser.add_argument("--sequence-length", type=int, help="no effect: it trains on whole parts of episodes")
    main(
        parser.parse_args(),
        RecurrentPPO,
        "MlpLstmPolicy",
        features_extractor_class=HiddenLayer,
        lstm_hidden_size=SIZE,
        net_arch=[],
        shared_lstm=True,
        enable_critic_lstm=False,
    )

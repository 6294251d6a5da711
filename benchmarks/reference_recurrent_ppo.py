"""PPO with a recurrent layer in one file and one process: ``reference_ppo.py`` on sequences, in plain torch.

It shares no code with rlsrl. Policy and value are on a recurrent layer behind a hidden layer of 64 units.
Rollouts are cut into sequences, each with the state that acted at its start. Minibatches consist of sequences,
which are unrolled side by side.

    python benchmarks/reference_recurrent_ppo.py --env-id CartPole-without-velocities --recurrent lstm --report
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from reference_ppo import Trainer, layer, main, parser_of
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution

HIDDEN = 64
State = tuple[Tensor, ...]


class RecurrentAgent(nn.Module):
    """Policy and value on a recurrent layer."""

    def __init__(self, envs: gymnasium.vector.VectorEnv[Any, Any, Any], kind: str, size: int) -> None:
        super().__init__()
        assert isinstance(envs.single_action_space, spaces.Discrete)
        (num_inputs,) = envs.single_observation_space.shape or (1,)
        self.size, self.num_arrays = size, 2 if kind == "lstm" else 1
        self.hidden = nn.Sequential(layer(num_inputs, HIDDEN), nn.Tanh())
        self.cell: Any = (nn.LSTMCell if kind == "lstm" else nn.GRUCell)(HIDDEN, size)
        for name, parameter in self.cell.named_parameters():
            if "weight" in name:
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)
        if kind == "lstm":  # the forget gate starts open
            nn.init.ones_(self.cell.bias_ih.data[size : 2 * size])
        self.actor = layer(size, int(envs.single_action_space.n), 0.01)
        self.critic = layer(size, 1, 1.0)

    def initial(self, number: int) -> State:
        return tuple(torch.zeros(number, self.size) for _ in range(self.num_arrays))

    def forward(self, observation: Tensor, state: State, first: Tensor) -> tuple[Distribution, Tensor, State]:
        """Evaluate L frames of N environments, [L, N, ...]: a frame that begins an episode is seen with zeros."""
        features, outputs = self.hidden(observation), []
        for inputs, begins in zip(features, first, strict=True):
            state = tuple(array * ~begins[:, None] for array in state)
            found = self.cell(inputs, state if self.num_arrays == 2 else state[0])
            state = found if self.num_arrays == 2 else (found,)
            outputs.append(state[0])
        hidden = torch.stack(outputs)
        return Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1), state


class RecurrentTrainer(Trainer):
    """Repeats rollout, advantages and update, with the state of each environment."""

    agent: RecurrentAgent

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.state = self.agent.initial(args.num_envs)
        self.first = torch.zeros(args.num_envs, dtype=torch.bool)

    def make_agent(self) -> nn.Module:
        return RecurrentAgent(self.envs, self.args.recurrent, self.args.recurrent_size)

    @torch.no_grad()
    def rollout(self) -> dict[str, Tensor]:
        """Return the sequences of one iteration, [L, S, ...], and the states before them, [S, size]."""
        args, steps, states = self.args, [], []
        for step in range(args.num_steps):
            if step % args.sequence_length == 0:
                states.append(self.state)
            distribution, value, self.state = self.agent(self.observation[None], self.state, self.first[None])
            action = distribution.sample()[0]
            following, reward, terminated, truncated, info = self.envs.step(action.numpy())
            steps.append(
                {
                    "observation": self.observation,
                    "first": self.first,
                    "action": action,
                    "log_prob": distribution.log_prob(action[None])[0],
                    "value": value[0],
                    "reward": torch.as_tensor(reward, dtype=torch.float32),
                    "terminated": torch.as_tensor(terminated),
                    "ended": torch.as_tensor(terminated | truncated),
                    "valid": ~self.resetting,
                }
            )
            # A step that only resets leads to the first frame of an episode.
            self.observation, self.first = self.as_tensor(following), self.resetting
            self.resetting = steps[-1]["ended"]
            self.count(info, int(steps[-1]["valid"].sum()))
        rows = {name: torch.stack([each[name] for each in steps]) for name in steps[0]}
        rows["advantage"] = self.advantages(rows)
        rows["return"] = rows["advantage"] + rows["value"]
        cut = {name: _sequences(array, args.sequence_length) for name, array in rows.items()}
        starts = {f"state{place}": torch.cat(arrays) for place, arrays in enumerate(zip(*states, strict=True))}
        return cut | starts

    def last_value(self) -> Tensor:
        value: Tensor = self.agent(self.observation[None], self.state, self.first[None])[1]
        return value[0]

    def update(self, rows: dict[str, Tensor]) -> None:
        number = rows["action"].shape[1]
        for _ in range(self.args.epochs):
            order = torch.from_numpy(self.rng.permutation(number))
            for chosen in torch.split(order, self.args.minibatch_size // self.args.sequence_length):
                self.minibatch_step(
                    {
                        name: array[chosen] if name.startswith("state") else array[:, chosen]
                        for name, array in rows.items()
                    }
                )

    def evaluated(self, rows: dict[str, Tensor]) -> tuple[dict[str, Tensor], Distribution, Tensor]:
        """Return the transitions of a minibatch, and what the network says of them now."""
        state = tuple(rows[f"state{place}"] for place in range(self.agent.num_arrays))
        distribution, value, _ = self.agent(rows["observation"], state, rows["first"])
        assert isinstance(distribution, Categorical)
        valid = rows["valid"]
        kept = {name: array[valid] for name, array in rows.items() if not name.startswith("state")}
        return kept, Categorical(logits=distribution.logits[valid]), value[valid]


def _sequences(array: Tensor, length: int) -> Tensor:
    """[T, N, ...] -> [L, T / L * N, ...], the earlier sequences first."""
    cut = array.reshape(-1, length, *array.shape[1:])
    return cut.transpose(0, 1).flatten(1, 2)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--recurrent", choices=["gru", "lstm"], default="lstm")
    parser.add_argument("--recurrent-size", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=16)
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments(), RecurrentTrainer)

"""What several roles are built from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from rlsrl.api.resolved import EvaluatorConfig, TrainerConfig
from rlsrl.api.spec import Environment, Network
from rlsrl.data.specs import EnvSpec
from rlsrl.envs.factory import EnvironmentSource
from rlsrl.parameters.protocols import ParameterDB
from rlsrl.workers.build.parameters import open_parameter_store

if TYPE_CHECKING:
    from rlsrl.policies.torch_policy import TorchPolicy

PROGRAM_KEY = "program"
"""In the broadcast's description and in a version's metadata: the exported actor, None if it cannot be one."""

Purpose = Literal["network", "minibatches", "acting"]
_DOMAINS: dict[Purpose, int] = {"network": 11, "minibatches": 12, "acting": 13}


def derived_seed(seed: int, purpose: Purpose, *key: int) -> int:
    """A seed for one use of randomness, unrelated to those of other uses and keys."""
    return int(np.random.SeedSequence(seed, spawn_key=(_DOMAINS[purpose], *key)).generate_state(1, np.uint32)[0])


def open_db(config: TrainerConfig | EvaluatorConfig) -> ParameterDB:
    """The experiment's durable parameter database.

    Raises:
        ConfigurationError: it cannot be used as configured.
    """
    return open_parameter_store(config.parameter_store)


def environment_source(environment: Environment) -> EnvironmentSource:
    """Where the experiment's environments come from."""
    return EnvironmentSource(id=environment.id, factory=environment.factory, kwargs=environment.kwargs)


def torch_policy(network: Network, env_spec: EnvSpec, *, seed: int) -> TorchPolicy:
    """The experiment's policy with the weights its seed gives. Imports torch.

    Raises:
        ConfigurationError: the user's own network cannot be made, or is not what a policy needs.
    """
    from rlsrl.policies.build import build_network
    from rlsrl.policies.networks import MlpActorCritic
    from rlsrl.policies.torch_policy import TorchPolicy
    from rlsrl.runtime.references import load_callable

    seed = derived_seed(seed, "network")
    if network.custom is not None:
        factory = load_callable(network.custom.factory, where="network factory")
        return TorchPolicy(build_network(factory, env_spec, network.custom.kwargs, seed=seed), env_spec)
    assert network.mlp is not None, "validation leaves exactly one"  # noqa: S101 - an invariant of our own
    kwargs = {"hidden_sizes": network.mlp.hidden_sizes, "activation": network.mlp.activation}
    return TorchPolicy(build_network(MlpActorCritic, env_spec, kwargs, seed=seed), env_spec)

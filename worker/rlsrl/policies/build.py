"""Makes a network from its factory, built-in or the user's own, and checks its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlsrl.data.specs import EnvSpec
from rlsrl.policies.device import CPU
from rlsrl.policies.masked import MaskedNetwork
from rlsrl.runtime.errors import ConfigurationError

PROBE_LANES = 3
"""Lanes of the observation on which a new network is tried."""

RENAMED_METHODS = {"actor_program": "export_actor", "arranged": "to_preferred_layout"}
"""New names of a network's optional methods, by former name."""


def build_network(
    factory: Callable[..., Any],
    env_spec: EnvSpec,
    kwargs: Mapping[str, Any],
    *,
    seed: int,
    device: torch.device = CPU,
    has_values: bool = False,
) -> nn.Module:
    """Return ``factory(env_spec, **kwargs)``, for example ``networks.MlpActorCritic``, on ``device``.

    The network is made on the CPU, moved to the device and tried there once, on an observation of zeros. ``seed`` seeds
    torch's generator: equal seeds give equal weights, and the generator's state is restored. The factory gets the spec
    without an action mask; the mask is applied to the network's logits. ``has_values``: the network must value actions
    (``networks.ActionValueNetwork``).

    Raises:
        ConfigurationError: the factory raised or did not return an ``nn.Module``, the network has an optional method
            under its former name, or the network's outputs are not distribution parameters [N, A] and values [N], or
            the values of actions [N, A], float32 and finite.
    """
    name = f"{getattr(factory, '__module__', '?')}:{getattr(factory, '__qualname__', factory)}"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        unmasked, mask = env_spec.unmasked, env_spec.action.mask
        try:
            network = factory(unmasked, **kwargs)
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"network factory {name} raised {type(error).__name__} for arguments {dict(kwargs)}: {error}"
            ) from error
        if not isinstance(network, nn.Module):
            raise ConfigurationError(f"network factory {name} returned a {type(network).__name__}, not an nn.Module")
        _check_method_names(network, name)
        network.to(device)
        _try(network, unmasked, name, device, has_values=has_values)
    return network if mask is None else MaskedNetwork(network, mask)


def _check_method_names(network: nn.Module, name: str) -> None:
    for owner in type(network).__mro__:
        for former, present in RENAMED_METHODS.items():
            # A class with both names also works with earlier releases.
            if former in vars(owner) and present not in vars(owner):
                raise ConfigurationError(
                    f"the network of {name} has the method {former!r}, which rlsrl does not call (did you mean "
                    f"{present!r}?); rename the method"
                )


def _try(network: nn.Module, env_spec: EnvSpec, name: str, device: torch.device, *, has_values: bool) -> None:
    observation = {
        path: torch.zeros((PROBE_LANES, *spec.shape), dtype=getattr(torch, spec.dtype), device=device)
        for path, spec in env_spec.observation.items()
    }
    try:
        with torch.no_grad():
            outputs = network(observation)
    except Exception as error:
        shapes = {path: tuple(tensor.shape) for path, tensor in observation.items()}
        raise ConfigurationError(
            f"the network of {name} raised {type(error).__name__} for observations of shape {shapes} ({device}): "
            f"{error}"
        ) from error
    if has_values:
        if not (isinstance(outputs, Mapping) and outputs.keys() == {"q"} and isinstance(outputs["q"], Tensor)):
            found = f"keys {[*outputs]}" if isinstance(outputs, Mapping) else type(outputs).__name__
            raise ConfigurationError(
                f"the network of {name} returned {found}; the algorithm needs the values of actions, {{'q': values}}"
            )
        _check_output("values of actions", outputs["q"], (PROBE_LANES, env_spec.action.num_actions), name)
        return
    if not (isinstance(outputs, tuple) and len(outputs) == 2 and all(isinstance(part, Tensor) for part in outputs)):
        raise ConfigurationError(
            f"the network of {name} returned {type(outputs).__name__}, not the pair (distribution parameters, value)"
        )
    _check_output("distribution parameters", outputs[0], (PROBE_LANES, env_spec.action.distribution_size), name)
    _check_output("values", outputs[1], (PROBE_LANES,), name)


def _check_output(what: str, tensor: Tensor, shape: tuple[int, ...], name: str) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
        raise ConfigurationError(
            f"for {PROBE_LANES} observations the network of {name} returns {what} of shape {tuple(tensor.shape)} and "
            f"dtype {tensor.dtype}; {shape} and torch.float32 are needed"
        )
    if not bool(torch.isfinite(tensor).all()):
        raise ConfigurationError(
            f"the network of {name} returns {what} that are not finite for an observation of zeros"
        )

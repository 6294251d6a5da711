"""Makes a network from its factory, built-in or the user's own, and checks its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlsrl.api.spec import NetworkOutputs
from rlsrl.data.specs import ArraySpec, EnvSpec
from rlsrl.policies.device import CPU
from rlsrl.policies.factories import BuiltIn
from rlsrl.policies.masked import masked_network
from rlsrl.policies.networks import (
    ACTION_VALUES_HEAD,
    HEADS,
    POLICY_HEAD,
    QUANTILES_HEAD,
    VALUE_HEAD,
    UnrolledNetwork,
    acting_head,
    num_choices,
    state_sizes_of,
    stepped,
    unrolled,
)
from rlsrl.runtime.errors import ConfigurationError

PROBE_LANES = 3
"""Lanes of the observation on which a new network is tried."""
PROBE_FRAMES = 4
"""Frames on which the ``unroll`` of a recurrent network is tried."""
UNROLL_TOLERANCE = 0.05
"""Allowed difference of its outputs, as a share of the largest: those in bfloat16 depend on the number of rows."""

RENAMED_METHODS = {"actor_program": "export_actor", "arranged": "to_preferred_layout"}
"""New names of a network's optional methods, by former name."""


def build_network(
    factory: Callable[..., Any],
    env_spec: EnvSpec,
    kwargs: Mapping[str, Any],
    *,
    seed: int,
    device: torch.device = CPU,
    outputs: NetworkOutputs = "policyAndValue",
) -> nn.Module:
    """Return ``factory(env_spec, **kwargs)``, for example ``networks.MlpActorCritic``, on ``device``.

    The network is made on the CPU, moved to the device and tried there once, on an observation of zeros. ``seed`` seeds
    torch's generator: equal seeds give equal weights, and the generator's state is restored. The factory gets the spec
    without an action mask; the mask is applied to the network's logits. ``outputs`` says which heads the network must
    have (``networks.HEADS``).

    Raises:
        ConfigurationError: the factory raised or did not return an ``nn.Module``, the network has an optional method
            under its former name, or a head is missing, or not of the shape that ``networks.PolicyNetwork`` says,
            float32 and finite, or the network values actions that are not discrete.
    """
    name = str(factory) if isinstance(factory, BuiltIn) else _name_of(factory)
    with seeded(seed):
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
        _try(network, unmasked, name, device, outputs=outputs)
        if isinstance(network, UnrolledNetwork) and state_sizes_of(network):
            _check_unroll(network, unmasked, name, device)
    return network if mask is None else masked_network(network, mask)


def _name_of(factory: Callable[..., Any]) -> str:
    return f"{getattr(factory, '__module__', '?')}:{getattr(factory, '__qualname__', factory)}"


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's generator of the CPU inside the block, and restore it after."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _check_method_names(network: nn.Module, name: str) -> None:
    for owner in type(network).__mro__:
        for former, present in RENAMED_METHODS.items():
            # A class with both names also works with earlier releases.
            if former in vars(owner) and present not in vars(owner):
                raise ConfigurationError(
                    f"the network of {name} has the method {former!r}, which rlsrl does not call (did you mean "
                    f"{present!r}?); rename the method"
                )


def _try(network: nn.Module, env_spec: EnvSpec, name: str, device: torch.device, *, outputs: NetworkOutputs) -> None:
    observation = {
        path: torch.zeros((PROBE_LANES, *spec.shape), dtype=getattr(torch, spec.dtype), device=device)
        for path, spec in env_spec.observation.items()
    }
    sizes = dict(state_sizes_of(network))
    state = {name: torch.zeros((PROBE_LANES, size), device=device) for name, size in sizes.items()}
    try:
        with torch.no_grad():
            found = network(observation, state) if state else network(observation)
    except Exception as error:
        shapes = {path: tuple(tensor.shape) for path, tensor in observation.items()}
        raise ConfigurationError(
            f"the network of {name} raised {type(error).__name__} for observations of shape {shapes} ({device}): "
            f"{error}"
        ) from error
    heads = _without_state(found, sizes, name) if state else found
    needed = HEADS[outputs]
    if ACTION_VALUES_HEAD in needed:
        num_choices(env_spec)
    if not isinstance(heads, Mapping) or any(not isinstance(heads.get(head), Tensor) for head in needed):
        found = f"the heads {sorted(map(str, heads))}" if isinstance(heads, Mapping) else f"a {type(heads).__name__}"
        raise ConfigurationError(
            f"the network of {name} returned {found}; the algorithm needs a mapping with the tensors "
            f"{' and '.join(map(repr, needed))}"
        )
    if acting_head(heads) not in needed:
        raise ConfigurationError(
            f"the network of {name} returned a head {acting_head(heads)!r}, by which actors would choose; the "
            f"algorithm needs {needed[0]!r} for that"
        )
    shapes = {
        POLICY_HEAD: (PROBE_LANES, env_spec.action.head_size),
        VALUE_HEAD: (PROBE_LANES,),
        ACTION_VALUES_HEAD: (PROBE_LANES, env_spec.action.num_outputs),
    }
    for head in needed:
        _check_head(head, heads[head], shapes[head], name)
    if (quantiles := heads.get(QUANTILES_HEAD)) is not None and ACTION_VALUES_HEAD in needed:
        _check_head(QUANTILES_HEAD, quantiles, (*shapes[ACTION_VALUES_HEAD], *quantiles.shape[-1:]), name)


def _without_state(found: Any, sizes: Mapping[str, int], name: str) -> Any:
    """Return the heads of what a recurrent network returned; check the state beside them."""
    is_pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)
    if not is_pair or not all(isinstance(tensor, Tensor) for tensor in found[1].values()):
        raise ConfigurationError(
            f"the recurrent network of {name} returned a {type(found).__name__}; a pair of mappings is needed: the "
            "heads and the next state"
        )
    heads, state = found
    shapes = {path: (tuple(tensor.shape), tensor.dtype) for path, tensor in state.items()}
    if shapes != {path: ((PROBE_LANES, size), torch.float32) for path, size in sizes.items()}:
        raise ConfigurationError(
            f"for {PROBE_LANES} observations the network of {name} returns a state of {shapes}; its state_sizes "
            f"{dict(sizes)} need [{PROBE_LANES}, size] of torch.float32"
        )
    return heads


def _check_unroll(network: nn.Module, env_spec: EnvSpec, name: str, device: torch.device) -> None:
    """Compare a network's own ``unroll`` with its ``forward`` on frames between which an episode begins."""
    generator = torch.Generator().manual_seed(0)
    frames = {
        path: _random(generator, (PROBE_FRAMES, PROBE_LANES, *spec.shape), spec).to(device)
        for path, spec in env_spec.observation.items()
    }
    state = {
        path: torch.rand((PROBE_LANES, size), generator=generator).to(device)
        for path, size in state_sizes_of(network).items()
    }
    is_first = torch.zeros((PROBE_FRAMES, PROBE_LANES), dtype=torch.bool, device=device)
    is_first[1, 0] = is_first[2, 1] = True
    with torch.no_grad():
        found, expected = unrolled(network, frames, state, is_first), stepped(network, frames, state, is_first)
    for mine, theirs in zip(found, expected, strict=True):
        for path, tensor in theirs.items():
            largest = UNROLL_TOLERANCE * float(tensor.abs().max())
            if path not in mine or not torch.allclose(mine[path], tensor, rtol=0.0, atol=largest):
                raise ConfigurationError(
                    f"the network of {name} has an unroll() whose {path!r} differs from that of forward() for each "
                    "frame; frames with is_first start from a state of zeros"
                )


def _random(generator: torch.Generator, shape: tuple[int, ...], spec: ArraySpec) -> Tensor:
    """Return random entries of the spec's dtype. Categories are their first values."""
    dtype = getattr(torch, spec.dtype)
    if spec.categories:
        first = torch.tensor([start for start, _ in spec.categories]).reshape(spec.shape)
        return first.expand(shape).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _check_head(head: str, tensor: Tensor, shape: tuple[int, ...], name: str) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
        raise ConfigurationError(
            f"for {PROBE_LANES} observations the network of {name} returns {head!r} of shape {tuple(tensor.shape)} and "
            f"dtype {tensor.dtype}; {shape} and torch.float32 are needed"
        )
    if not bool(torch.isfinite(tensor).all()):
        raise ConfigurationError(
            f"the network of {name} returns {head!r} with values that are not finite for an observation of zeros"
        )

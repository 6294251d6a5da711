"""Builds a policy worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from rlsrl.api.resolved import PolicyWorkerConfig
from rlsrl.data.inference import InferenceLayout
from rlsrl.data.specs import EnvSpec, state_specs
from rlsrl.parameters.protocols import ParameterSource
from rlsrl.policies.acting import Policy
from rlsrl.policies.numpy_policy import NumpyPolicy
from rlsrl.runtime.addresses import own_address
from rlsrl.streams.grpc_inference.server import GrpcInferenceServer
from rlsrl.workers.build.common import await_description, exported_actor, spec_of_environments, torch_policy
from rlsrl.workers.build.parameters import open_parameter_source
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.inference import BatchPredictor, Inference, InferencePipeline, OnArrivalInference
from rlsrl.workers.latest_parameters import LatestParameters


@dataclass(frozen=True, kw_only=True)
class PolicyParts:
    """The parts of a policy worker."""

    parameters: ParameterSource
    latest: LatestParameters
    predictor: BatchPredictor
    inference: Inference
    resources: ExitStack
    """Closes the server and the source of weights."""


def build_policy_worker(
    config: PolicyWorkerConfig, context: WorkerContext, *, still_wanted: Callable[[], bool]
) -> PolicyParts | None:
    """Return the parts, or None if the worker is no longer wanted. Wait for a trainer to publish the exported actor.

    Raises:
        ConfigurationError: the environment or the user's network cannot be made.
        AddressTaken: another policy worker serves this worker's address.
    """
    env_spec = spec_of_environments(config.environment, context)
    with ExitStack() as resources:
        parameters = open_parameter_source(config, context.token, context.tls)
        resources.callback(parameters.close)
        description = await_description(parameters, context, still_wanted)
        if description is None:
            return None
        server = GrpcInferenceServer(
            own_address(config.serving(config.inference_endpoints, context.index)),
            token=context.token,
            tls=context.tls,
            layout=InferenceLayout.of(env_spec, state_specs(config.network.state_sizes)),
            on_refused=lambda kind: context.metrics.inference_refused.labels(kind=kind).inc(),
            on_unauthenticated=context.count_unauthenticated,
        )
        resources.callback(server.close)
        latest = LatestParameters()
        policy = _policy(description, config, env_spec, context)
        predictor = BatchPredictor(policy, latest, metrics=context.metrics, now=context.clock.monotonic)
        make = OnArrivalInference if policy.is_quick else InferencePipeline
        inference: Inference = make(
            predictor,
            server,
            latest,
            max_batch_size=config.max_batch_size,
            waiting=context.waiting,
        )
        return PolicyParts(
            parameters=parameters,
            latest=latest,
            predictor=predictor,
            inference=inference,
            resources=resources.pop_all(),
        )


def _policy(
    description: Mapping[str, object], config: PolicyWorkerConfig, env_spec: EnvSpec, context: WorkerContext
) -> Policy:
    """Return the policy without torch if it has an exported form, else one that torch evaluates in this process."""
    exported = exported_actor(description)
    if exported is not None:
        return NumpyPolicy(exported)
    import torch

    from rlsrl.policies.device import device_for

    torch.set_num_threads(1)
    device = device_for(config.device, field="policyWorkers.device")
    context.log.info("evaluating_on", device=str(device))
    return torch_policy(config.network, env_spec, outputs=config.outputs, seed=config.seed, device=device)

"""What a policy worker is made of."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from rlsrl.api.resolved import PolicyWorkerConfig
from rlsrl.data.inference import InferenceLayout
from rlsrl.envs.factory import environment_spec
from rlsrl.parameters.protocols import ParameterSource
from rlsrl.runtime.addresses import own_address
from rlsrl.streams.grpc_inference import GrpcInferenceServer
from rlsrl.workers.build.common import environment_source, torch_policy
from rlsrl.workers.build.parameters import open_parameter_source
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.fresh import FreshParameters
from rlsrl.workers.inference import InferencePipeline


@dataclass(frozen=True, kw_only=True)
class PolicyParts:
    """What a policy worker is made of."""

    parameters: ParameterSource
    fresh: FreshParameters
    pipeline: InferencePipeline
    resources: ExitStack
    """Closes the server and the source of weights."""


def build_policy_worker(config: PolicyWorkerConfig, context: WorkerContext) -> PolicyParts:
    """The parts: first the policy, then what it is asked through and where its weights come from.

    Raises:
        ConfigurationError: the environment or the user's network cannot be made.
        AddressTaken: another policy worker serves this one's address.
    """
    env_spec = environment_spec(environment_source(config.environment))
    policy = torch_policy(config.network, env_spec, seed=config.seed)
    with ExitStack() as resources:
        server = GrpcInferenceServer(
            own_address(config.serving(config.inference_endpoints, context.index)),
            token=context.token,
            tls=context.tls,
            layout=InferenceLayout.of(env_spec),
            on_refused=lambda kind: context.metrics.inference_refused.labels(kind=kind).inc(),
            on_stranger=context.count_stranger,
        )
        resources.callback(server.close)
        parameters = open_parameter_source(config, context.token, context.tls)
        resources.callback(parameters.close)
        fresh = FreshParameters()
        pipeline = InferencePipeline(
            policy,
            server,
            fresh,
            max_batch_size=config.max_batch_size,
            metrics=context.metrics,
            clock=context.clock,
            waiting=context.waiting,
        )
        return PolicyParts(parameters=parameters, fresh=fresh, pipeline=pipeline, resources=resources.pop_all())

"""The RLExperiment: what a user writes, for one machine and for a cluster alike. One module a section of the spec.

Attribute docstrings are the reference: they become the schema's descriptions and the text of ``rlsrl explain``. Every
list, map, string and number has a bound, because the same models become a CustomResourceDefinition. A rule over
several fields is one record, a ``CrossFieldRule``, with its Python check and its CEL expression.
"""

from rlsrl.api.spec.algorithm import (
    ActionValueSettings,
    AlgorithmNeeds,
    AlgorithmSettings,
    AlgorithmSpec,
    CriticSpec,
    CustomAlgorithmSpec,
    DqnSpec,
    LinearScheduleSpec,
    NetworkOutputs,
    OptimizerName,
    PpoSpec,
    PqnSpec,
    PrioritySpec,
    ReplaySettings,
    ReplaySpec,
    SacSpec,
    ScheduleSpec,
    Td3Spec,
    TwinCriticSettings,
    UpdateWork,
    VtraceSpec,
)
from rlsrl.api.spec.egress import EgressPeer, EgressPort, EgressRule, LabelSelector
from rlsrl.api.spec.environment import Atari, Environment, EnvironmentSpec, HttpEnvironment, WorkerEnvironment
from rlsrl.api.spec.experiment import API_VERSION, KIND, ExperimentSpec, RLExperiment
from rlsrl.api.spec.metadata import Metadata
from rlsrl.api.spec.parameters import FilesystemStore, ObjectStore, ParameterStore, ParameterVersions
from rlsrl.api.spec.policy import VALUE_OPTIONS, Cnn, CustomNetwork, Mlp, Network, PolicySpec
from rlsrl.api.spec.run import PausedWorkers, Restarts, Security, Stop, Tracking, Wandb
from rlsrl.api.spec.scalars import NoiseColor, VectorActions
from rlsrl.api.spec.workers import (
    Actors,
    BufferWorkers,
    CompileMode,
    Device,
    Evaluators,
    FixedVersion,
    Pacing,
    PolicyWorkers,
    Trainers,
)

__all__ = [
    "API_VERSION",
    "KIND",
    "VALUE_OPTIONS",
    "ActionValueSettings",
    "Actors",
    "AlgorithmNeeds",
    "AlgorithmSettings",
    "AlgorithmSpec",
    "Atari",
    "BufferWorkers",
    "Cnn",
    "CompileMode",
    "CriticSpec",
    "CustomAlgorithmSpec",
    "CustomNetwork",
    "Device",
    "DqnSpec",
    "EgressPeer",
    "EgressPort",
    "EgressRule",
    "Environment",
    "EnvironmentSpec",
    "Evaluators",
    "ExperimentSpec",
    "FilesystemStore",
    "FixedVersion",
    "HttpEnvironment",
    "LabelSelector",
    "LinearScheduleSpec",
    "Metadata",
    "Mlp",
    "Network",
    "NetworkOutputs",
    "NoiseColor",
    "ObjectStore",
    "OptimizerName",
    "Pacing",
    "ParameterStore",
    "ParameterVersions",
    "PausedWorkers",
    "PolicySpec",
    "PolicyWorkers",
    "PpoSpec",
    "PqnSpec",
    "PrioritySpec",
    "RLExperiment",
    "ReplaySettings",
    "ReplaySpec",
    "Restarts",
    "SacSpec",
    "ScheduleSpec",
    "Security",
    "Stop",
    "Td3Spec",
    "Tracking",
    "Trainers",
    "TwinCriticSettings",
    "UpdateWork",
    "VectorActions",
    "VtraceSpec",
    "Wandb",
    "WorkerEnvironment",
]

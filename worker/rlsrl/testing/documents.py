"""Experiment documents generated from the models: valid ones, and ones with each kind of fault in each field."""

from __future__ import annotations

import copy
import itertools
import math
import random
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import JsonValue
from pydantic.fields import FieldInfo

from rlsrl.api.model import Model, yaml_name
from rlsrl.api.spec import (
    VALUE_OPTIONS,
    ActionValueSettings,
    AlgorithmSettings,
    AlgorithmSpec,
    CnnLayers,
    DenseLayers,
    EgressPeer,
    EgressPort,
    EgressRule,
    ImpalaLayers,
    InitialParameters,
    KeyEncoder,
    LabelSelector,
    PausedWorkers,
    ReplaySettings,
    RLExperiment,
)

JsonDocument = dict[str, Any]
"""A document as a JSON value."""


@dataclass(frozen=True)
class FieldType:
    """A field's type without None and Annotated, and its constraints."""

    type: Any
    constraints: tuple[Any, ...]

    def bound(self, name: str) -> Any:
        """Return the constraint of that name that applies, for example ``ge``, or None."""
        found = [getattr(each, name) for each in self.constraints if getattr(each, name, None) is not None]
        return found[-1] if found else None

    @property
    def items(self) -> tuple[FieldType, ...]:
        """The types of a tuple's or mapping's items."""
        return tuple(kind_of(argument) for argument in get_args(self.type) if argument is not Ellipsis)


@dataclass(frozen=True)
class Case:
    """One field of the document, with the models on its path."""

    path: tuple[str, ...]
    models: tuple[type[Model], ...]
    kind: FieldType
    required: bool

    @property
    def text(self) -> str:
        """The path with dots."""
        return ".".join(self.path)


def kind_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> FieldType:
    """Strip ``| None`` and ``Annotated``; collect constraints, inner ones first."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (each for each in get_args(annotation) if each is not type(None))
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        flat = tuple(item for each in extra for item in (each.metadata if isinstance(each, FieldInfo) else (each,)))
        return kind_of(inner, flat + metadata)
    return FieldType(annotation, metadata)


def is_list_of_models(kind: FieldType) -> bool:
    """Return whether the value is a list of mappings with fields: ``environment.egress`` and ``paused`` are."""
    return (
        get_origin(kind.type) is tuple
        and isinstance(kind.items[0].type, type)
        and issubclass(kind.items[0].type, Model)
    )


def is_ignored(field: FieldInfo) -> bool:
    """Return whether only Kubernetes writes the field."""
    return field.json_schema_extra == {"readOnly": True}


def walk(model: type[Model] = RLExperiment, path: tuple[str, ...] = (), models: tuple[Any, ...] = ()) -> Iterator[Case]:
    """Yield every field below the model, parents first."""
    for name, field in model.model_fields.items():
        if is_ignored(field):
            continue
        kind = kind_of(field.annotation, tuple(field.metadata))
        case = Case((*path, yaml_name(name)), (*models, model), kind, field.is_required())
        yield case
        if isinstance(kind.type, type) and issubclass(kind.type, Model):
            yield from walk(kind.type, case.path, case.models)


CASES = tuple(walk())
"""Every field that a user may write."""


LEAVES = tuple(case for case in CASES if not (isinstance(case.kind.type, type) and issubclass(case.kind.type, Model)))
"""The fields whose value is not a model."""


MODELS = {(): RLExperiment} | {case.path: case.kind.type for case in CASES if case not in LEAVES}
"""The models by path."""


ALL_MODELS = (
    *MODELS.values(), EgressRule, EgressPeer, EgressPort, LabelSelector, PausedWorkers,
    KeyEncoder, DenseLayers, CnnLayers, ImpalaLayers,
)  # fmt: skip
"""Every model, those in lists included."""


ALGORITHMS: Mapping[str, type[AlgorithmSettings]] = {
    case.path[-1]: case.kind.type
    for case in CASES
    if isinstance(case.kind.type, type) and issubclass(case.kind.type, AlgorithmSettings)
}
"""The models of the algorithms' blocks."""


MINIBATCH_SIZES = {name: ("algorithm", name, *block.minibatch_size_path) for name, block in ALGORITHMS.items()}
"""Where each algorithm has the rows of a gradient step, below ``spec``."""


EXAMPLES = {
    "apiVersion": "rlsrl.dev/v1alpha1", "kind": "RLExperiment", "metadata.name": "a", "metadata.namespace": "n",
    "spec.environment.id": "CartPole-v1", "spec.environment.actionMask": "action_mask",
    "spec.environment.http.url": "http://simulators:8765",
    "spec.environment.http.tokenFile": "/etc/simulators/token",
    "spec.parameters.store.objectStore.url": "s3://bucket/prefix",
    "spec.parameters.store.objectStore.endpoint": "https://s3.example.com",
    "spec.parameters.store.objectStore.region": "eu-central-1",
    "spec.parameters.store.objectStore.credentialsSecret": "bucket-keys",
    "spec.parameters.store.filesystem.size": "50Gi",
    "spec.parameters.store.filesystem.storageClassName": "standard",
    "spec.bufferWorkers.volume.size": "50Gi", "spec.bufferWorkers.volume.storageClassName": "standard",
    "spec.trainers.gpuResource": "amd.com/gpu", "spec.security.tlsSecret": "certificates",
    "spec.tracking.wandb.project": "my-project", "spec.tracking.wandb.entity": "my-team",
    "spec.evaluators.parameters.version": "1.2500", "spec.evaluators.parameters.tag": "best",
    "spec.evaluators.parameters.file": "/models/best.safetensors",
    "spec.parameters.from.run": "runs/cartpole", "spec.parameters.from.file": "/models/best.safetensors",
    "spec.parameters.from.experiment": "teacher",
    "spec.parameters.from.version": "1.2500", "spec.parameters.from.tag": "best",
}  # fmt: skip
"""Valid strings for fields with a pattern. All factories use the same string."""


INFO_KEYS = ("is_success", "reward_forward", "0/x.y-z")
"""Valid items of lists of strings."""

POD_TEMPLATES: tuple[JsonDocument, ...] = (
    {},
    {"metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}}},
    {"spec": {"nodeSelector": {"pool": "spot"}, "tolerations": [{"key": "spot", "operator": "Exists"}]}},
    {
        "spec": {
            "volumes": [{"name": "more", "emptyDir": {"sizeLimit": "1Mi"}}],
            "containers": [
                {
                    "name": "worker",
                    "env": [{"name": "LEVEL", "value": "7"}],
                    "resources": {"requests": {"cpu": "1m"}},
                    "volumeMounts": [{"name": "more", "mountPath": "/more"}],
                }
            ],
        }
    },
)
"""Valid values of ``podTemplate``."""


EGRESS: tuple[JsonDocument, ...] = (
    {"to": {"cidr": "203.0.113.0/24"}, "ports": [{"port": 8443}]},
    {"to": {"cidr": "2001:db8::/32"}, "ports": [{"port": 9000, "endPort": 9010, "protocol": "UDP"}, {"port": 1}]},
    {"to": {"podSelector": {"matchLabels": {"app": "simulator"}}}, "ports": [{"port": 80}]},
    {"to": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "games"}}}, "ports": [{"port": 80}]},
    {"to": {"namespaceSelector": {}, "podSelector": {}}, "ports": [{"port": 65535, "endPort": 65535}]},
)
"""Valid rules of ``environment.egress``."""
ALLOWED_EGRESS: tuple[JsonDocument, ...] = (
    {"cidr": "203.0.113.0/24"},
    {"cidr": "2001:db8::/32"},
    {"namespaceSelector": {}},
)
"""The administrator's setting ``environments.egress`` that allows these rules."""
_PEER, _PORTS = EGRESS[0]["to"], EGRESS[0]["ports"]
BROKEN_EGRESS: tuple[JsonDocument, ...] = (
    {"ports": _PORTS},
    {"to": {}, "ports": _PORTS},
    {"to": {**_PEER, "podSelector": {}}, "ports": _PORTS},
    {"to": {"cidr": "203.0.113.256/24"}, "ports": _PORTS},
    {"to": {"cidr": "203.0.113.0/33"}, "ports": _PORTS},
    {"to": {"cidr": "203.0.113.0"}, "ports": _PORTS},
    {"to": {"podSelector": {"matchLabels": {"app": "two words"}}}, "ports": _PORTS},
    {"to": {"podSelector": {"app": "simulator"}}, "ports": _PORTS},
    {"to": _PEER},
    {"to": _PEER, "ports": []},
    {"to": _PEER, "ports": [{"port": 0}]},
    {"to": _PEER, "ports": [{"port": 65536}]},
    {"to": _PEER, "ports": [{"port": 80, "endPort": 79}]},
    {"to": _PEER, "ports": [{"port": 80, "protocol": "tcp"}]},
)
"""Rules that the API server and the models refuse."""
PAUSED: tuple[JsonDocument, ...] = (
    {"role": "trainer"},
    {"role": "actor"},
    {"role": "actor", "indices": [0, 3]},
    {"role": "evaluator", "indices": [7]},
)
"""Valid entries of ``paused``."""
BROKEN_PAUSED: tuple[JsonDocument, ...] = (
    {"indices": [0]},
    {"role": "coordinator"},
    {"role": "trainer", "indices": [0]},
    {"role": "actor", "indices": []},
    {"role": "actor", "indices": [-1]},
    {"role": "actor", "index": 0},
)
"""Entries that the API server and the models refuse."""
ENCODERS: tuple[JsonDocument, ...] = (
    {"key": "camera", "impalaCnn": {"channels": [16, 32], "layerNorm": True}},
    {"key": "arm/camera", "cnn": {"hiddenSize": 64}},
    {"key": "arm/joints", "mlp": {"hiddenSizes": [32], "activation": "relu"}},
    {"key": "0", "mlp": {}},
    {"key": "armour plate", "mlp": {}},
)
"""Valid entries of ``policy.network.encoders``, with arrays of their own."""
BROKEN_ENCODERS: tuple[JsonDocument, ...] = (
    {"mlp": {}},
    {"key": "camera"},
    {"key": "camera", "mlp": {}, "cnn": {}},
    {"key": "", "mlp": {}},
    {"key": "a\nb", "mlp": {}},
    {"key": 0, "mlp": {}},
    {"key": "camera", "mlp": {"shareLayers": True}},
    {"key": "camera", "cnn": {"initialization": "uniform"}},
    {"key": "camera", "impalaCnn": {"channels": []}},
    {"key": "camera", "custom": {"factory": "package.module:make"}},
)
"""Entries that the API server and the models refuse."""
OVERLAPPING_ENCODERS: tuple[tuple[str, str], ...] = (("arm", "arm"), ("arm", "arm/camera"), ("arm/a/b", "arm/a"))
"""Keys of two encoders that have arrays in common."""
ITEMS: Mapping[Any, tuple[JsonDocument, ...]] = {EgressRule: EGRESS, PausedWorkers: PAUSED, KeyEncoder: ENCODERS}
"""Valid entries of lists of models, by model."""


def legal(case: Case) -> Any:
    """Return a valid value of the field: the lowest, the first or the smallest."""
    kind = case.kind
    if isinstance(kind.type, type) and issubclass(kind.type, Model):
        return {each.path[-1]: legal(each) for each in CASES if each.required and each.path[:-1] == case.path}
    if get_origin(kind.type) is Literal:
        return get_args(kind.type)[0]
    if kind.type is str:
        return EXAMPLES.get(case.text, "package.module:make")
    if is_list_of_models(kind):
        return [copy.deepcopy(ITEMS[kind.items[0].type][0])]
    if get_origin(kind.type) is tuple:
        return [INFO_KEYS[0] if kind.items[0].type is str else kind.items[0].bound("ge")]
    if get_origin(kind.type) is dict:
        # Other names than in ``kwargs``: each argument is given once.
        if case.path[:-1] == BY_RANK:
            return {f"{case.path[-1]}_key": _legal_entry(kind)}
        return {"key": kind.items[1].bound("ge") if kind.items[1].type is int else "value"}
    if kind.type is bool:
        return False
    low = kind.bound("ge")
    return low if low is not None else kind.bound("le") / 2


BY_RANK = ("spec", "environment", "kwargsByRank")
"""The arguments that differ between environments."""


def _legal_entry(kind: FieldType) -> Any:
    """Return a valid value of an entry of a mapping, for the environments of ``minimal``."""
    value = kind.items[1]
    return [1] * MINIMAL_ENVIRONMENTS if get_origin(value.type) is tuple else value.bound("ge") or 0


MINIMAL_ENVIRONMENTS = 8


def minimal() -> JsonDocument:
    """Return a minimal valid document."""
    return {
        "apiVersion": "rlsrl.dev/v1alpha1",
        "kind": "RLExperiment",
        "metadata": {"name": "a"},
        "spec": {
            "environment": {"id": "CartPole-v1"},
            "actors": {"environments": MINIMAL_ENVIRONMENTS},
            "stop": {"envSteps": 1000},
        },
    }


def _opened(document: JsonDocument, path: tuple[str, ...]) -> JsonDocument:
    """Return the mapping at the path; it and the mappings above are added if missing, with their required fields."""
    mapping = document
    for depth, step in enumerate(path, start=1):
        mapping = mapping.setdefault(step, {})
        for case in CASES:
            if case.required and case.path[:-1] == path[:depth]:
                mapping.setdefault(case.path[-1], legal(case))
    return mapping


def with_value(case: Case, value: Any) -> JsonDocument:
    """Return a document that is valid except for the field: with its parents, without other members of their unions."""
    document = minimal()
    for depth, (step, model) in enumerate(zip(case.path, case.models, strict=True)):
        mapping, members = _opened(document, case.path[:depth]), camel(model.exactly_one)
        for other in members:
            if step in members and step != other:
                mapping.pop(other, None)
    spec = document["spec"]
    if case.path[-1] in VALUE_OPTIONS:
        spec["algorithm"] = {"pqn": {}}
    if case.path[:4] in ((*NETWORK, "recurrent"), (*NETWORK, "encoders")):
        _opened(document, NETWORK).setdefault("mlp", {})
    is_for_replay = case.path[:2] == ("spec", "pacing") and case.path[-1] in RATIO
    if is_for_replay or case.path[:3] == ("spec", "bufferWorkers", "volume"):
        _opened(document, STORES["custom"])
    if _store_of(document) is not None:
        spec.setdefault("pacing", {})["trainStepsPerEnvStep"] = 1
    if case.path[:-1] == START and case.path[-1] not in camel(InitialParameters.exactly_one):
        _opened(document, START)["run"] = "runs/cartpole"
    _opened(document, case.path[:-1])[case.path[-1]] = value
    return document


NETWORK = ("spec", "policy", "network")
START = ("spec", "parameters", "from")
"""Where a document names the weights from which a run starts."""
STARTS: tuple[JsonDocument, ...] = (
    {"file": "/models/best.safetensors"},
    {"file": "/models/a b.safetensors", "what": "weights"},
)
"""Valid values of it, in pods, too. Without ``experiment``, which another one of the namespace would have to have."""
BROKEN_STARTS: tuple[JsonDocument, ...] = (
    {"tag": "best"},
    {"run": "cartpole", "version": "1.5", "tag": "best"},
    {"run": "cartpole", "tag": "latest"},
    {"run": "cartpole", "tag": "2.1500"},
    {"file": "/models/best.safetensors", "tag": "best"},
    {"file": "/models/best.safetensors", "version": "1.5"},
    {"file": "/models/best.safetensors", "what": "all"},
    {"run": "cartpole", "file": "/models/best.safetensors"},
    {"experiment": "teacher", "file": "/models/best.safetensors"},
    {"experiment": "Teacher"},
)
"""Values that the API server and the models refuse."""

STORES = {
    name: ("spec", "algorithm", name, *block.replay_path) for name, block in ALGORITHMS.items() if block.replay_path
}
"""Where each algorithm that may replay describes its store."""
RATIO = ("trainStepsPerEnvStep", "maxTrainStepsBehind")
"""The fields of ``pacing`` that go with ``replay``."""


def _store_of(document: JsonDocument) -> tuple[str, ...] | None:
    """Return where a document describes the store of its algorithm, by default or in its words; None without one."""
    for name, path in STORES.items():
        block = _mapping_at(document, path[:3])
        if block is not None and (name != "custom" or "replay" in block.get("needs", {})):
            return path
    return None


def wrong_types(kind: FieldType) -> list[Any]:
    """Return values of wrong types."""
    if get_origin(kind.type) is Literal:
        return [1, True, ["x"], {"x": 1}]
    if get_origin(kind.type) is tuple:
        return ["x", 1, {"x": 1}]
    if get_origin(kind.type) is dict or (isinstance(kind.type, type) and issubclass(kind.type, Model)):
        return ["x", 1, [1], True]
    return {
        int: ["1", 1.5, True, [1], {"x": 1}],
        float: ["1", True, [1.0], {"x": 1}],
        bool: [1, "true", 0.0, []],
        str: [1, 1.5, True, ["x"], {"x": 1}],
    }[kind.type]


def out_of_range(kind: FieldType) -> list[Any]:
    """Return invalid values of the right type."""
    if get_origin(kind.type) is Literal:
        return ["other", get_args(kind.type)[0].upper() + "_"]
    if kind.type is str:
        wrong = ["no spaces, please", "-x", "ä", "x\n", "\x7f"]
        pattern = kind.bound("pattern")
        return ["x" * (kind.bound("max_length") + 1), "", *(each for each in wrong if not re.search(pattern, each))]
    if get_origin(kind.type) is tuple:
        item, too_many = kind.items[0], kind.bound("max_length") + 1
        if is_list_of_models(kind):
            return [[ITEMS[item.type][0]] * too_many]
        if item.type is str:
            return [[INFO_KEYS[0]] * too_many]
        return [[], [item.bound("ge")] * too_many]
    if get_origin(kind.type) is dict:
        value = "value" if kind.items[1].type in (str, JsonValue) else _legal_entry(kind)
        return [{f"key{number}": value for number in range(kind.bound("max_length") + 1)}]
    if kind.type is bool:
        return []
    above, low, high = kind.bound("gt"), kind.bound("ge"), kind.bound("le")
    return [above if above is not None else low - 1, -(10**18), high + 1, high * 2 + 1, 10**18]


def variation(rng: random.Random) -> JsonDocument:
    """Return a random valid document: random fields first, then the changes that rules over several fields require."""
    document = minimal()
    algorithm = rng.choice(camel(AlgorithmSpec.exactly_one))
    _opened(document, ("spec", "algorithm", algorithm))
    for case in LEAVES:
        if case.path[0] in ("apiVersion", "kind") or rng.random() < 0.5 or other_member_given(document, case):
            continue
        _opened(document, case.path[:-1])[case.path[-1]] = random_legal(case, rng)
    spec = document["spec"]
    trainers = {name: value for name, value in spec.get("trainers", {}).items() if name == "gpuResource"}
    actors: JsonDocument = {"replicas": rng.randint(1, 8), "rolloutLength": rng.choice([1, 5, 16, 128, 2048])}
    actors[rng.choice(["environments", "environmentsPerActor"])] = rng.randint(2, 64)
    spec["actors"] = actors
    if not issubclass(ALGORITHMS[algorithm], ActionValueSettings):
        network = _mapping_at(document, NETWORK) or {}
        for kind, option in itertools.product(("mlp", "cnn", "impalaCnn"), VALUE_OPTIONS):
            network.get(kind, {}).pop(option, None)
    if rng.random() < 0.5:
        actors["vectorization"] = rng.choice(_vectorizations(spec))
    total = actors.get("environments") or actors["environmentsPerActor"] * actors["replicas"]
    batch = rng.choice([total, 2 * total, 64])
    spec["trainers"] = trainers if batch == total else {**trainers, "batchEnvironments": batch}
    spec["pacing"] = {"maxPolicyLag": 64 if total % actors["replicas"] or batch == 64 else 1}
    transitions = batch * actors["rolloutLength"]
    divisors = [number for number in range(2, min(transitions, 5000) + 1) if transitions % number == 0]
    *above, size = MINIBATCH_SIZES[algorithm]
    _opened(document, ("spec", *above))[size] = rng.choice(divisors)
    _fit_recurrence(document, algorithm, rng)
    num_actors = min(actors["replicas"], total)
    if total % num_actors:
        spec.pop("bufferWorkers", None)
    elif "bufferWorkers" in spec:
        divisors = [number for number in range(1, num_actors + 1) if num_actors % number == 0]
        spec["bufferWorkers"] = {"replicas": rng.choice(divisors)}
    if "maxSteps" in (evaluators := spec.get("evaluators", {})):
        evaluators["maxSteps"] = rng.randint(65_536, 10**9)
    if "parameters" in evaluators:
        # Half of the documents follow training: fields of both kinds are covered.
        for name in rng.choice([("parameters",), ("replicas", "everySeconds", "everyVersions")]):
            evaluators.pop(name, None)
    if "from" in (parameters := spec.get("parameters", {})):
        parameters["from"] = copy.deepcopy(rng.choice(STARTS))
    if (store := _store_of(document)) is not None:
        _fit_replay(document, store, rng, num_environments=total)
    if "each" in spec["environment"].get("kwargsByRank", {}):
        spec["environment"]["kwargsByRank"]["each"] = {"shard": [{"files": [number]} for number in range(total)]}
    return document


def _fit_recurrence(document: JsonDocument, algorithm: str, rng: random.Random) -> None:
    """Change what does not go with a recurrent network, or the network."""
    network, block = _mapping_at(document, NETWORK) or {}, inside(document, ("spec", "algorithm", algorithm))
    if not ALGORITHMS[algorithm].trains_recurrent or "custom" in network:
        network.pop("recurrent", None)
    if not ALGORITHMS[algorithm].trains_recurrent and "custom" in network:
        network["custom"].pop("state", None)
    if "custom" in network or "cnn" in network or "impalaCnn" in network:
        network.pop("encoders", None)
    if network.keys() & {"recurrent", "encoders"} and not network.keys() & {"mlp", "cnn", "impalaCnn"}:
        network["mlp"] = {}
    if "recurrent" not in network and "state" not in network.get("custom", {}):
        return
    if issubclass(ALGORITHMS[algorithm], ReplaySettings):
        # Whole rollouts for as many trainers as there may be.
        block["minibatchSize"] = (
            document["spec"]["actors"]["rolloutLength"] * math.lcm(*range(1, 9)) * rng.randint(1, 2)
        )
    else:
        together = math.gcd(document["spec"]["actors"]["rolloutLength"], block["minibatchSize"])
        block["sequenceLength"] = rng.choice([length for length in range(1, together + 1) if together % length == 0])
        has_earlier = block["sequenceLength"] < document["spec"]["actors"]["rolloutLength"]
        block["burnIn"] = rng.choice([0, block["sequenceLength"]]) if has_earlier else 0


def _fit_replay(document: JsonDocument, store: tuple[str, ...], rng: random.Random, *, num_environments: int) -> None:
    """Change what does not go with replay."""
    spec, replay = document["spec"], _opened(document, store)
    spec["pacing"]["trainStepsPerEnvStep"] = rng.choice([0.001, 0.25, 1, 100])
    has_buffers = spec.pop("bufferWorkers", None) is not None
    spec["trainers"].pop("batchEnvironments", None)
    actors = spec["actors"]
    num_actors = min(actors["replicas"], actors.get("environments", actors["replicas"]))
    minibatch_size: Any = inside(spec, MINIBATCH_SIZES[store[2]])
    shared = math.gcd(num_actors, minibatch_size)
    num_trainers = rng.choice([number for number in range(1, shared + 1) if shared % number == 0])
    if num_trainers > 1:
        spec["trainers"]["replicas"] = num_trainers
    block = inside(spec, ("algorithm", store[2]))
    if has_buffers and not (spec.get("policy", {}).get("normalizeObservations") or block.get("normalizeRewards")):
        spec["bufferWorkers"] = {"replicas": num_trainers, **rng.choice([{}, {"volume": {"size": "7Gi"}}])}
    env_steps = actors["rolloutLength"] * -(-num_environments // num_trainers) * num_trainers
    replay["start"] = rng.choice([0, 1000, 5000])
    replay["capacity"] = max(replay["start"], 2 * env_steps) + rng.choice([0, 1, 10**6])
    if rng.random() < 0.3:
        spec["pacing"]["maxTrainStepsBehind"] = 64 + math.ceil(100 * num_trainers * env_steps)


def _vectorizations(spec: JsonDocument) -> list[str]:
    """Return the vectorizations that are valid with the rest of the spec."""
    around = {"factory", "kwargsByRank", "atari", "maxEpisodeSteps", "frameStack", "actionMask"} & set(
        spec["environment"]
    )
    has_groups = spec["actors"].get("ringSize", 1) > 1
    return ["loop", *([] if around else ["native"]), *([] if has_groups else ["threads"])]


def random_legal(case: Case, rng: random.Random) -> Any:
    """Return a random valid value of the field."""
    kind = case.kind
    if get_origin(kind.type) is Literal:
        return rng.choice(get_args(kind.type))
    if get_origin(kind.type) is tuple:
        item, number = kind.items[0], rng.randint(1, kind.bound("max_length"))
        if is_list_of_models(kind):
            return copy.deepcopy(rng.sample(ITEMS[item.type], rng.randint(1, 2)))
        if item.type is str:
            return rng.choices(INFO_KEYS, k=number)
        return [rng.randint(item.bound("ge"), item.bound("le")) for _ in range(number)]
    if get_origin(kind.type) is dict and kind.items[1].type is int:
        low, high = kind.items[1].bound("ge"), kind.items[1].bound("le")
        return {f"key{number}": rng.choice([low, high]) for number in range(rng.randint(1, kind.bound("max_length")))}
    if get_origin(kind.type) is dict and kind.items[1].type is not str:
        if case.path[-1] == "podTemplate":
            return copy.deepcopy(rng.choice(POD_TEMPLATES))
        if case.path[:-1] == BY_RANK:
            return legal(case)
        return {"size": rng.choice([1, 2.5, "three", None, [1, {"deep": True}]]), "e": "1e3", "date": "2001-01-01"}
    if kind.type is bool:
        return rng.random() < 0.5
    if kind.type is int:
        low, high = kind.bound("ge"), kind.bound("le")
        return rng.choice([low, high, rng.randint(low, high), float(rng.randint(low, min(high, 2**50)))])
    if kind.type is float:
        low = kind.bound("ge") if kind.bound("ge") is not None else 1e-12
        return rng.choice([low, kind.bound("le"), rng.uniform(low, kind.bound("le"))])
    return legal(case)


def other_member_given(document: JsonDocument, case: Case) -> bool:
    """Return whether a union on the field's path already has another member."""
    return any(
        step in camel(model.exactly_one) and step != other and other in (_mapping_at(document, case.path[:depth]) or {})
        for depth, (step, model) in enumerate(zip(case.path, case.models, strict=True))
        for other in camel(model.exactly_one)
    )


def inside(document: JsonDocument, path: tuple[str, ...]) -> JsonDocument:
    """Return the part of a document at a path."""
    for step in path:
        document = document[step]
    return document


def camel(names: tuple[str, ...]) -> list[str]:
    """Return names in camelCase, as in YAML."""
    return [yaml_name(name) for name in names]


def refused_documents() -> list[JsonDocument]:
    """Return documents with one fault that random ones rarely have: an empty union, or a wrong entry of a list."""
    entries = []
    lists = (
        (("spec", "environment", "egress"), [[entry] for entry in BROKEN_EGRESS]),
        (("spec", "paused"), [[entry] for entry in BROKEN_PAUSED]),
        ((*NETWORK, "encoders"), [[entry] for entry in BROKEN_ENCODERS]),
        ((*NETWORK, "encoders"), [[{"key": key, "mlp": {}} for key in keys] for keys in OVERLAPPING_ENCODERS]),
    )
    for path, wrong in lists:
        for faulty in wrong:
            document = minimal()
            if path[:-1] == NETWORK:
                _opened(document, NETWORK)["mlp"] = {}
            _opened(document, path[:-1])[path[-1]] = copy.deepcopy(faulty)
            entries.append(document)
    for kind, block in (("cnn", {}), ("impalaCnn", {}), ("custom", {"factory": "package.module:make"})):
        document = minimal()
        document["spec"]["policy"] = {"network": {kind: block, "encoders": [copy.deepcopy(ENCODERS[0])]}}
        entries.append(document)
    unions = [
        with_value(case, {})
        for case in CASES
        if (model := MODELS.get(case.path)) is not None and (model.exactly_one or model.at_least_one)
    ]
    starts = []
    for start in BROKEN_STARTS:
        starts.append(minimal())
        _opened(starts[-1], START[:-1])[START[-1]] = copy.deepcopy(start)
    without_pictures = minimal()
    without_pictures["spec"] |= {"environment": {"http": {"url": "http://s:1"}}, "evaluators": {"video": {}}}
    without_values = []
    kinds, options = ("mlp", "cnn", "impalaCnn"), (("dueling", True), ("quantiles", 2))
    for kind, (option, value) in itertools.product(kinds, options):
        document = minimal()
        document["spec"] |= {"algorithm": {"ppo": {}}, "policy": {"network": {kind: {option: value}}}}
        without_values.append(document)
    return [*unions, *entries, *starts, without_pictures, *without_values, *_refused_shards()]


def _refused_shards() -> Iterator[JsonDocument]:
    """Yield documents whose buffer workers cannot keep the transitions of their algorithm, or have none to keep."""
    without_replay = minimal()
    without_replay["spec"]["bufferWorkers"] = {"volume": {}}
    yield without_replay
    for name, path in STORES.items():
        for wrong in ("pacing", "policy", name):
            document = with_value(next(case for case in CASES if case.path == path), {})
            spec = document["spec"]
            spec["bufferWorkers"] = {}
            spec["pacing"] = {"trainStepsPerEnvStep": 1, "maxPolicyLag": int(wrong != "pacing")}
            if wrong == "policy":
                spec.setdefault("policy", {})["normalizeObservations"] = True
            elif wrong == name:
                spec["algorithm"][name]["normalizeRewards"] = True
            yield document


def perhaps_broken(rng: random.Random) -> JsonDocument:
    """Return a variation with random changes below ``spec``; about half of them are invalid."""
    document = variation(rng)
    for _ in range(rng.choice([0, 1, 1, 2])):
        rng.choice(_CHANGES)(document, rng)
    # An API server cannot count the values of each argument.
    if (by_rank := _mapping_at(document, BY_RANK)) is not None:
        by_rank.pop("each", None)
    # Nor does it know the minibatches of a training step.
    pacing = _mapping_at(document, ("spec", "pacing"))
    if pacing is not None and type(bound := pacing.get("maxTrainStepsBehind")) is int and bound > 0:
        pacing["maxTrainStepsBehind"] = max(bound, 10**8)
    return document


def as_sent(value: Any) -> Any:
    """Return the value as kubectl sends it: Go writes whole numbers without a fraction, else CEL sees no integers."""
    if isinstance(value, dict):
        return {name: as_sent(each) for name, each in value.items()}
    if isinstance(value, list):
        return [as_sent(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e21 else value


def _change_a_value(document: JsonDocument, rng: random.Random) -> None:
    case, mapping = _some_place(document, rng)
    wrong = [*wrong_types(case.kind), *(out_of_range(case.kind) if case in LEAVES else [])]
    mapping[case.path[-1]] = rng.choice(wrong) if rng.random() < 0.7 else random_legal(case, rng)


def _misspell(document: JsonDocument, rng: random.Random) -> None:
    case, mapping = _some_place(document, rng)
    if case.path[-1] in mapping:
        mapping[case.path[-1] + "s"] = mapping.pop(case.path[-1])


def _leave_out(document: JsonDocument, rng: random.Random) -> None:
    case, mapping = _some_place(document, rng)
    if rng.random() < 0.5:
        mapping.pop(case.path[-1], None)
    else:
        mapping[case.path[-1]] = None


def _add(document: JsonDocument, rng: random.Random) -> None:
    case, mapping = _some_place(document, rng)
    mapping.setdefault(case.path[-1], legal(case))


def _give_another_member(document: JsonDocument, rng: random.Random) -> None:
    unions = [case for case in CASES if case.path[-1] in camel(case.models[-1].exactly_one)]
    case = rng.choice(unions)
    mapping = _mapping_at(document, case.path[:-1])
    if mapping is not None:
        mapping[case.path[-1]] = legal(case)


def _break_arithmetic(document: JsonDocument, rng: random.Random) -> None:
    """Put small numbers into fields that rules compare and divide."""
    spec = document["spec"]
    if rng.random() < 0.5:
        spec.setdefault("bufferWorkers", {})
    if rng.random() < 0.5:
        spec.pop("policyWorkers", None)
    for path in ARITHMETIC:
        mapping = _mapping_at(spec, path[:-1])
        if mapping is not None and (path[-1] in mapping or len(path) == 2) and rng.random() < 0.4:
            mapping[path[-1]] = rng.choice([1, 2, 3, 4, 6, 7, 8, 12])


def _leave_the_end_open(document: JsonDocument, rng: random.Random) -> None:
    """Remove the number of transitions at which schedules end, or all stop conditions."""
    spec = document["spec"]
    spec["stop"] = rng.choice([{}, {"trainSteps": 10}, {"trainSteps": 10}])
    for algorithm in _mapping_at(spec, ("algorithm",)) or {}:
        block = _mapping_at(spec, ("algorithm", algorithm))
        if block is not None and algorithm in ALGORITHMS and rng.random() < 0.5:
            block[rng.choice(ALGORITHMS[algorithm].schedule_names())] = {"linear": rng.choice([{}, {"envSteps": 100}])}


def _vectorize(document: JsonDocument, rng: random.Random) -> None:
    """Set another vectorization than ``loop`` and a field that may exclude it."""
    spec = document["spec"]
    environment, actors = _mapping_at(spec, ("environment",)), _mapping_at(spec, ("actors",))
    if environment is None or actors is None:
        return
    actors["vectorization"] = rng.choice(["native", "threads"])
    mapping, name, value = rng.choice(
        [
            (environment, "frameStack", 2),
            (environment, "maxEpisodeSteps", 100),
            (actors, "maxDecorrelationSteps", rng.randint(0, 3)),
            (actors, "ringSize", rng.choice([1, 2])),
        ]
    )
    mapping[name] = value


def _break_egress(document: JsonDocument, rng: random.Random) -> None:
    """Add a wrong rule of egress, or a correct one."""
    if (environment := _mapping_at(document, ("spec", "environment"))) is not None:
        environment["egress"] = [copy.deepcopy(rng.choice([*BROKEN_EGRESS, *EGRESS]))]


def _replay(document: JsonDocument, rng: random.Random) -> None:
    """Let an algorithm replay, with what may not go with it, or set a ratio for one that does not."""
    spec = document["spec"]
    if rng.random() < 0.7:
        replay = rng.choice([{}, {"capacity": 10}, {"capacity": 900, "start": 901}, {"start": 0}])
        needs = {"minibatchSize": rng.choice([7, 64]), "replay": replay}
        name = rng.choice([*STORES])
        block: JsonDocument = {"factory": "mine:Mine", "needs": needs} if name == "custom" else needs
        spec["algorithm"] = {name: block | ({"normalizeRewards": True} if rng.random() < 0.3 else {})}
    if rng.random() < 0.7:
        spec["pacing"] = {rng.choice([*RATIO, RATIO[0], RATIO[0]]): 1, "maxPolicyLag": 64}
    if rng.random() < 0.8:
        spec.pop("bufferWorkers", None)
    if rng.random() < 0.3:
        spec.setdefault("policy", {})["normalizeObservations"] = True


def _make_recurrent(document: JsonDocument, rng: random.Random) -> None:
    """Make the network recurrent, whatever algorithm trains it, on sequences of some length."""
    spec = document["spec"]
    own = {"factory": "package.module:make"}
    spec.setdefault("policy", {})["network"] = copy.deepcopy(
        rng.choice([
            {"mlp": {}, "recurrent": {}},
            {"cnn": {}, "recurrent": {"kind": "lstm"}},
            {"impalaCnn": {}, "recurrent": {}},
            {"custom": {**own, "state": {"hidden": 64}}}, {"custom": own, "recurrent": {}},
        ])
    )  # fmt: skip
    if rng.random() < 0.8:
        algorithm = rng.choice(("ppo", "vtrace", "dqn"))
        settings: JsonDocument = {"sequenceLength": rng.choice([1, 2, 3, 5, 8]), "burnIn": rng.choice([0, 1, 6])}
        if algorithm == "dqn":
            settings = {"minibatchSize": rng.choice([2, 15, 64, 256]), "burnIn": rng.random() < 0.5}
            spec.setdefault("pacing", {})["trainStepsPerEnvStep"] = 1
        spec["algorithm"] = {algorithm: (spec.get("algorithm") or {}).get(algorithm) or {}}
        spec["algorithm"][algorithm] |= settings


def _encode(document: JsonDocument, rng: random.Random) -> None:
    """Give keys encoders, whatever network joins them; some have arrays in common, or a fault."""
    keys = rng.choice([("arm", "camera"), *OVERLAPPING_ENCODERS])
    encoders = rng.choice([[{"key": key, "mlp": {}} for key in keys], [rng.choice([*BROKEN_ENCODERS, *ENCODERS])]])
    network = {rng.choice(["mlp", "mlp", "cnn"]): {}, "encoders": copy.deepcopy(encoders)}
    document["spec"].setdefault("policy", {})["network"] = network


def _pause(document: JsonDocument, rng: random.Random) -> None:
    """Pause workers that may exist or not, by a correct entry or a wrong one."""
    document["spec"]["paused"] = [copy.deepcopy(rng.choice([*BROKEN_PAUSED, *PAUSED]))]


def _fix_a_version(document: JsonDocument, rng: random.Random) -> None:
    """Let evaluators play one version, with a field that may exclude it, or with a tag that may be none."""
    tag = rng.choice(["best", "latest", "2.1500", "v2.1500"])
    name, value = rng.choice([("replicas", rng.randint(1, 2)), ("everySeconds", 5), ("everyVersions", 2)])
    document["spec"]["evaluators"] = {"parameters": {"tag": tag}, name: value}


def _lower_the_lag(document: JsonDocument, rng: random.Random) -> None:
    """Set a policy lag that fits only batches of whole rollouts."""
    document["spec"]["pacing"] = {"maxPolicyLag": rng.choice([0, 1])}


_CHANGES = (
    _change_a_value, _misspell, _leave_out, _add, _give_another_member, _break_arithmetic, _leave_the_end_open,
    _vectorize, _fix_a_version, _lower_the_lag, _break_egress, _pause, _break_arithmetic, _replay, _replay,
    _make_recurrent, _make_recurrent, _encode,
)  # fmt: skip
"""The rules that arithmetic, replay and recurrence break are the most, so that they have two entries."""


ARITHMETIC = (
    ("actors", "environments"), ("actors", "environmentsPerActor"), ("actors", "replicas"), ("actors", "ringSize"),
    ("actors", "rolloutLength"), ("trainers", "replicas"), ("trainers", "batchEnvironments"),
    ("trainers", "gpusPerPod"),
    ("bufferWorkers", "replicas"), ("pacing", "maxPolicyLag"), ("evaluators", "maxSteps"),
    ("evaluators", "environments"), ("evaluators", "replicas"), *MINIBATCH_SIZES.values(),
)  # fmt: skip
"""The numbers below ``spec`` that rules use."""


def _some_place(document: JsonDocument, rng: random.Random) -> tuple[Case, JsonDocument]:
    """Return a random field below ``spec`` and its parent mapping in the document."""
    while True:
        case = rng.choice(CASES)
        mapping = _mapping_at(document, case.path[:-1])
        if case.path[0] == "spec" and len(case.path) > 1 and mapping is not None:
            return case, mapping


def _mapping_at(document: JsonDocument, path: tuple[str, ...]) -> JsonDocument | None:
    found: Any = document
    for step in path:
        found = found.get(step) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None

"""``spec.parameters``: which versions of the weights are stored, and where."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlsrl.api.model import INTEGRAL, LIVE, REFUSE, Model
from rlsrl.api.rules import CrossFieldRule, Fault
from rlsrl.api.spec.scalars import (
    Count,
    FilePath,
    ObjectName,
    PositiveSeconds,
    Tag,
    VersionText,
    VolumeSize,
    WhenDeleted,
)
from rlsrl.api.spec.versions import tag_rule


class FilesystemStore(Model):
    """The run folder; on a cluster, the experiment's volume, a PersistentVolumeClaim ``<name>-data``."""

    size: VolumeSize = "10Gi"
    """Size of the volume."""
    storage_class_name: ObjectName | None = None
    """The volume's StorageClass; by default the cluster's default class."""
    when_deleted: Annotated[WhenDeleted, LIVE] = "Retain"
    """Whether the volume is kept or deleted with the experiment."""


class ObjectStore(Model):
    """An S3 bucket, at Amazon or any store with conditional writes (If-Match, If-None-Match). The bucket must exist.
    Credentials never stand here: workers read AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY from their environment."""

    url: Annotated[
        str,
        Field(
            pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._-]+)*/?$",
            max_length=512,
            examples=["s3://my-bucket/experiments"],
        ),
    ]
    """The bucket and the prefix of all keys. Each run has its own folder below, ``<name>-<run>``."""
    endpoint: (
        Annotated[
            str,
            Field(
                pattern=r"^https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[1-9][0-9]{0,4})?(/[A-Za-z0-9._/-]*)?$",
                max_length=512,
                examples=["https://s3.example.com"],
            ),
        ]
        | None
    ) = None
    """The store's URL; by default AWS_ENDPOINT_URL, else Amazon's."""
    region: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$", max_length=63, examples=["eu-central-1"])] | None = None
    """The bucket's region; by default AWS_REGION, else us-east-1."""
    answer_seconds: PositiveSeconds = 30.0
    """Seconds that a request waits for an answer, and for which failed requests are repeated."""
    credentials_secret: ObjectName | None = None
    """On a cluster: the Secret whose keys become environment variables of the workers that use the bucket."""


class ParameterStore(Model):
    """Storage of weight versions and of the state that resuming needs."""

    exactly_one: ClassVar[tuple[str, ...]] = ("filesystem", "object_store")

    filesystem: FilesystemStore | None = None
    object_store: ObjectStore | None = None


def _one_version(initial: InitialParameters) -> Fault | None:
    if initial.version is None or initial.tag is None:
        return None
    return Fault(f"version {initial.version} and tag {initial.tag!r} may name two versions", "one of version and tag")


def _file_has_one_version(initial: InitialParameters) -> Fault | None:
    if initial.file is None or (initial.version is None and initial.tag is None):
        return None
    return Fault("a file has one version, without tags", "run or experiment, with version or tag; or file alone")


def _file_has_no_state(initial: InitialParameters) -> Fault | None:
    if initial.file is None or initial.what == "weights":
        return None
    return Fault("a file of weights has no state of a trainer", "weights; or run or experiment instead of file")


class InitialParameters(Model):
    """Weights of an earlier run, or of another program, from which a new run starts. By default they are random, by the
    seed. A run that resumes has its own."""

    exactly_one: ClassVar[tuple[str, ...]] = ("run", "experiment", "file")
    rules: ClassVar[tuple[CrossFieldRule, ...]] = (
        tag_rule("the newest version, omit tag"),
        CrossFieldRule(
            at="tag",
            check=_one_version,
            cel="!has(self.version) || !has(self.tag)",
            message="version and tag may name two versions: give one of them",
        ),
        CrossFieldRule(
            at="file",
            check=_file_has_one_version,
            cel="!has(self.file) || (!has(self.version) && !has(self.tag))",
            message="a file has one version, without tags",
        ),
        CrossFieldRule(
            at="what",
            check=_file_has_no_state,
            cel="!has(self.file) || self.what == 'weights'",
            message="a file of weights has no state of a trainer: give a run or an experiment",
        ),
    )

    run: FilePath | None = None
    """For `rlsrl run`: a run folder, or the name of one in runs/."""
    experiment: ObjectName | None = None
    """On a cluster: an experiment of the same namespace, while it trains or after its end. Its coordinator serves the
    weights until it is suspended or deleted. If it has ``security.tlsSecret``, both experiments need certificates of
    the same authorities. For `rlsrl run`: the run of that name in runs/."""
    file: FilePath | None = None
    """A safetensors file: one that `rlsrl params export` wrote, or one with tensors by the names of the network's
    parameters. On a cluster it is a path in the trainers' pods, for example on a volume of ``trainers.podTemplate``."""
    version: VersionText | None = None
    """A version of the run or experiment, in quotes; by default the newest."""
    tag: Tag | None = None
    """The version of the run or experiment with this tag."""
    what: Literal["weights", "all"] = "weights"
    """``weights``: the weights of the network, and the statistics that normalise its observations. ``all``: the
    trainers' state at that version, too: the optimizer's moments, critics, target networks and the scale of rewards.
    The algorithm must be the same. Steps and schedules begin at 0 in both cases, and replay stores are empty."""


class ParameterVersions(Model):
    """Which versions of the weights are stored, and where."""

    store: Annotated[ParameterStore, REFUSE] = ParameterStore(filesystem=FilesystemStore())
    """Where versions are stored."""
    from_: Annotated[InitialParameters, REFUSE] | None = None
    keep_last: Annotated[int, Field(ge=1, le=10_000), INTEGRAL] = 5
    """Untagged versions that are kept. Older ones are removed."""
    every_seconds: PositiveSeconds = 10.0
    """Seconds between stored versions: the training that a crash can cost."""
    every_steps: Count | None = None
    """Training steps between stored versions. With everySeconds, the earlier of the two counts."""
    tag_every_seconds: PositiveSeconds | None = None
    """Seconds between permanent versions, which are never removed and have the tag `step-N`. If one cannot be stored
    before a newer version is due, the next version that can be stored is permanent instead."""
    tag_every_steps: Count | None = None
    """Training steps between permanent versions: see tagEverySeconds."""
    store_request: (
        Annotated[
            str,
            Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9:.+_-]*$", max_length=64, examples=["2026-11-26T16:45:00Z"]),
        ]
        | None
    ) = None
    """Any word, such as a time. Each time that it changes, the trainers store a version at the next step. `rlsrl
    control RUN checkpoint` and `kubectl rlsrl control NAME checkpoint` set it to the present time."""
    retry_last_seconds: PositiveSeconds = 300.0
    """Seconds for which storing the last version of a run is repeated while it fails, for example on a full disk. Then
    the run fails and the training since the newest stored version is lost."""

"""The stored versions of a run as rows, and their tags: for ``Run`` and for ``rlsrl params``, also on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlsrl.parameters.evaluations import return_mean_of
from rlsrl.parameters.protocols import Corrupt, ParameterDB, Ref, VersionInfo


@dataclass(frozen=True, kw_only=True)
class VersionRow:
    """One stored version of a run, without its weights. ``pandas.DataFrame`` takes a list of rows."""

    version: str
    """For example ``"1.2500"``."""
    tags: tuple[str, ...] = ()
    """Its tags. A tagged version is never pruned."""
    env_steps: float | None = None
    """Transitions trained until this version."""
    return_mean: float | None = None
    """Mean return of the last episodes of training; None: no episode had ended."""
    evaluation: float | None = None
    """Mean return of its evaluation; None: it has none, or some of its episodes did not end. ``metadata["evaluation"]``
    has all of it."""
    created_at: float | None = None
    """Unix seconds."""
    num_parameters: int | None = None
    """Number of weights."""
    nbytes: int | None = None
    """Size of the stored weights in bytes."""
    has_state: bool = False
    """Whether the state of the trainer is stored, too, so that training can resume from this version."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """All that was stored with the version, JSON values."""
    damage: str | None = None
    """Why the stored weights or the trainer's state cannot be used; None: they are intact. If the version's header is
    damaged, the other fields have their defaults."""

    @classmethod
    def of(cls, info: VersionInfo, damage: str | None = None) -> VersionRow:
        """Return the row of a version whose header can be read."""
        return cls(
            version=str(info.version),
            tags=info.tags,
            env_steps=_number(info, "env_steps"),
            return_mean=_number(info, "return_mean"),
            evaluation=return_mean_of(info),
            created_at=info.created_at,
            num_parameters=info.num_parameters,
            nbytes=info.nbytes,
            has_state=info.has_state,
            metadata=info.metadata,
            damage=damage,
        )


def version_rows(db: ParameterDB, policy: str) -> list[VersionRow]:
    """Return a row for each stored version, oldest first. All versions are read in full, and damaged ones are marked.

    Raises:
        ParameterError: the policy has no versions; the text names the stored policies.
        OSError: the store failed.
    """
    damage = db.damage(policy)
    stored = db.versions(policy) if damage else stored_infos(db, policy)
    infos = {info.version: info for info in stored}
    return [
        VersionRow.of(infos[version], damage.get(version))
        if version in infos
        else VersionRow(version=str(version), damage=damage[version])
        for version in sorted({*infos, *damage})
    ]


def stored_infos(db: ParameterDB, policy: str) -> list[VersionInfo]:
    """Return all stored versions, oldest first.

    Raises:
        ParameterError: the policy has no versions; the text names the stored policies.
        OSError: the store failed.
    """
    infos = db.versions(policy)
    if not infos:
        db.get(policy)  # raises an error that names the policies in the store
    return infos


def tag_version(db: ParameterDB, policy: str, ref: Ref, *tags: str) -> VersionInfo:
    """Tag the version that ``ref`` names, and return it. A tag of another version moves to it.

    Raises:
        ParameterError: there is no such version, with the nearest match; or its header is damaged.
        ValueError: a tag has other characters than allowed, or names a version already.
        OSError: the store failed.
    """
    db.tag(policy, ref, *tags)
    for info in db.versions(policy):
        if tags[0] in info.tags:
            return info
    raise Corrupt(f"version {ref} is tagged, but its header is damaged")


def _number(info: VersionInfo, name: str) -> float | None:
    value = info.metadata.get(name)
    return float(value) if isinstance(value, int | float) else None

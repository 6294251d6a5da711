"""The one version that an evaluator plays instead of the newest ones: ``evaluators.parameters``.

``rlsrl run`` reads it before a process starts, so that a wrong name costs nothing. Evaluators read it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlsrl.api.spec import FixedVersion
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Corrupt, ParameterDB, Parameters, VersionInfo, VersionNotFound
from rlsrl.parameters.weights_file import decode_version
from rlsrl.runtime.errors import ConfigurationError, damage, did_you_mean
from rlsrl.workers.build.common import exported_actor

LISTED_FILES = 5
"""Files of the folder that an error about a missing file names."""


class FixedVersionReader:
    """Finds and reads the version. It writes nothing."""

    def __init__(self, fixed: FixedVersion, db: ParameterDB, policy_name: str) -> None:
        self._fixed = fixed
        self._db = db
        self._policy_name = policy_name

    def read(
        self, versions: Sequence[VersionInfo], played: Version | None = None
    ) -> tuple[VersionInfo, Parameters] | None:
        """Return the version with its weights; None if nothing but ``played`` is to be played.

        Args:
            versions: All stored versions of the run.
            played: The version that was played last. A tag may name another one since. A file is read once.

        Raises:
            ConfigurationError: the version or the file is missing or damaged; the text names what exists.
            OSError: the store failed.
        """
        if (found := self._find(versions, played)) is None:
            return None
        try:
            exported_actor(found[0].metadata)
        except (KeyError, TypeError, ValueError) as error:
            raise self.error(f"another version of rlsrl exported its actor: {damage(error)}") from error
        return found

    def _find(self, versions: Sequence[VersionInfo], played: Version | None) -> tuple[VersionInfo, Parameters] | None:
        if self._fixed.file is not None:
            return None if played is not None else self._of_file(Path(self._fixed.file))
        info = next((info for info in versions if self._names(info)), None)
        if played is not None and (info is None or info.version == played):
            return None  # A version that was played may be pruned.
        return self._of_store(info, is_run_empty=not versions)

    def error(self, problem: object) -> ConfigurationError:
        """Return the error about the field, its value and what is wrong with that."""
        ((field, value),) = self._fixed.model_dump(exclude_none=True).items()
        return ConfigurationError(f"evaluators.parameters.{field} {value!r}: {problem}")

    def _names(self, info: VersionInfo) -> bool:
        if self._fixed.tag is not None:
            return self._fixed.tag in info.tags
        return self._fixed.version is not None and Version.parse(self._fixed.version) == info.version

    def _of_store(self, info: VersionInfo | None, *, is_run_empty: bool) -> tuple[VersionInfo, Parameters] | None:
        named = self._fixed.tag or self._fixed.version
        assert named is not None, "validation leaves exactly one"
        try:
            parameters = self._db.get(self._policy_name, named if info is None else info.version)
        except VersionNotFound as error:
            if not is_run_empty:
                raise self.error(error) from error
            advice = "evaluators.parameters.file plays weights of another run"
            raise self.error(f"this run has not stored a version yet; {advice}") from error
        except Corrupt as error:
            raise self.error(error) from error
        assert parameters is not None, "None only where newer_than is given"
        return None if info is None else (info, parameters)  # None: stored since the listing

    def _of_file(self, path: Path) -> tuple[VersionInfo, Parameters]:
        try:
            data = path.read_bytes()
            parameters, header = decode_version(data, path.name)
        except FileNotFoundError as error:
            raise self.error(f"the file does not exist{_others(path)}") from error
        except OSError as error:
            raise self.error(f"cannot be read: {error.strerror or error}") from error
        except Corrupt as error:
            raise self.error(f"is no weights file as `rlsrl params export` writes it: {error}") from error
        info = VersionInfo(
            policy=self._policy_name,
            version=parameters.version,
            tags=(),
            created_at=header.created_at,
            num_parameters=header.num_parameters,
            nbytes=len(data),
            has_state=False,
            metadata=header.metadata,
        )
        return info, parameters


def _others(path: Path) -> str:
    """Return which weights files are in the folder of a missing one, and the nearest name, for an error."""
    try:
        names = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return f"; neither does a readable folder {path.parent}"
    files = [name for name in names if name.endswith(".safetensors")]
    more = f" and {len(files) - LISTED_FILES} more" if len(files) > LISTED_FILES else ""
    listed = f"{', '.join(files[:LISTED_FILES])}{more}" if files else "no *.safetensors"
    return f"; {path.parent} has {listed}{did_you_mean(path.name, names)}"

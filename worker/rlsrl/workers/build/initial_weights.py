"""The weights of another run or program from which a new run starts: ``parameters.from``.

``rlsrl run`` reads them before a process starts, so that a wrong name costs nothing. Trainers read them again, and only
they know the network that the weights must fit. Once the first version is stored, nothing reads them any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlsrl.api.spec import InitialParameters
from rlsrl.data.version import Version
from rlsrl.envs.spaces import OBSERVATION
from rlsrl.parameters.layout import difference, joined, shapes_in, split
from rlsrl.parameters.protocols import ParameterDB, ParameterError, Parameters, TrainerState, VersionInfo
from rlsrl.parameters.weights_file import NamedWeights, decode_weights
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.workers.build.parameters import open_source
from rlsrl.workers.build.run_database import RESOLVED, open_run_database

if TYPE_CHECKING:
    from rlsrl.algorithms.learner import Learner
    from rlsrl.policies.flat import FlatLayout

FIELD = "parameters.from"


@dataclass(frozen=True, kw_only=True, eq=False)
class InitialWeights:
    """What a new run starts from."""

    origin: str
    """Where it comes from, for logs and errors."""
    version: str | None
    """The run's version; None: it comes from a file."""
    weights: NamedWeights
    state: TrainerState | None = None
    """The trainer's state; None if only the weights are wanted."""

    def parameters(self, layout: FlatLayout, version: Version) -> Parameters:
        """Return the weights in the order of a network's layout, as that version.

        Raises:
            ConfigurationError: the weights are of another network; the text names what differs.
        """
        found = {name: tuple(array.shape) for name, array in self.weights.tensors.items()}
        if differs := difference(found, layout.shapes):
            raise ConfigurationError(f"{FIELD}: {self.origin} is of another network than policy.network: {differs}")
        if self.state is not None and [*found] != [*layout.shapes]:
            raise ConfigurationError(
                f"{FIELD}.what is all, and {self.origin} has its weights in another order than policy.network; "
                "allowed: weights"
            )
        vector = joined(self.weights.tensors, layout.shapes)
        return Parameters(version=version, vector=vector, layout=layout.digest, statistics=self.weights.statistics)

    def start(self, learner: Learner) -> None:
        """Have a learner, made with ``parameters``, continue with the statistics and, if wanted, the state.

        Raises:
            ConfigurationError: the run normalises other observations, or the state is of another algorithm.
        """
        self._require_statistics(set(learner.normalizer.statistics))
        if self.state is None:
            learner.normalizer.start_from(self.weights.statistics)
            return
        try:
            learner.start_from(self.state.arrays)
        except (KeyError, ValueError) as error:
            raise ConfigurationError(
                f"{FIELD}.what is all, and the state of {self.origin} does not fit this run's algorithm: {error}; "
                "allowed: weights"
            ) from error

    def _require_statistics(self, own: set[str]) -> None:
        """Raise ConfigurationError unless the statistics of observations have these names."""
        given = {name for name in self.weights.statistics if name.startswith(OBSERVATION)}
        if own == given:
            return
        if own and given:
            names = f"{', '.join(sorted(given))}; this run needs {', '.join(sorted(own))}"
            raise ConfigurationError(f"{FIELD}: {self.origin} has the statistics {names}")
        has = "has" if given else "has no"
        raise ConfigurationError(
            f"policy.normalizeObservations is {str(bool(own)).lower()}, and {self.origin} {has} statistics of "
            f"observations; allowed: {str(bool(given)).lower()}"
        )


def read_initial_weights(initial: InitialParameters, policy_name: str) -> InitialWeights:
    """Return what ``parameters.from`` names. It writes nothing.

    Raises:
        ConfigurationError: the run, its version or the file is missing or damaged; the text names what exists.
        OSError: the run's parameter store failed, or the experiment's coordinator does not answer.
    """
    try:
        if initial.file is not None:
            return _of_file(Path(initial.file))
        if initial.experiment is not None:
            return _of_experiment(initial, initial.experiment, policy_name)
        assert initial.run is not None, "validation leaves exactly one"
        return _of_run(initial, initial.run, policy_name)
    except OSError:  # also ServiceUnavailable, a ParameterError: another attempt may succeed
        raise
    except (ParameterError, ValueError) as error:
        raise ConfigurationError(f"{FIELD}: {error}") from error


def _of_file(path: Path) -> InitialWeights:
    try:
        weights = decode_weights(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigurationError(f"{FIELD}.file {str(path)!r} cannot be read: {error.strerror or error}") from error
    origin = str(path) if weights.header is None else f"version {weights.header.version} in {path}"
    return InitialWeights(origin=origin, version=None, weights=weights)


def _of_run(initial: InitialParameters, run: str, policy_name: str) -> InitialWeights:
    if not (Path(run) / RESOLVED).exists():
        raise ConfigurationError(f"{FIELD}.run {run!r} is not a run folder: it has no {RESOLVED}")
    return _of_database(open_run_database(Path(run)), initial, run, policy_name)


def _of_experiment(initial: InitialParameters, experiment: str, policy_name: str) -> InitialWeights:
    from rlsrl.parameters.service import ServiceRefused, ServiceUnavailable

    db = open_source()
    try:
        return _of_database(db, initial, f"experiment {experiment}", policy_name)
    except (ServiceUnavailable, ServiceRefused) as error:  # refused: it was deleted and made again a moment ago
        raise ConnectionError(
            f"{FIELD}.experiment: the coordinator of {experiment} does not serve its weights: {error}. It serves them "
            "until the experiment is suspended or deleted"
        ) from error
    finally:
        db.close()


def _of_database(db: ParameterDB, initial: InitialParameters, source: str, policy_name: str) -> InitialWeights:
    parameters = db.get(policy_name, initial.version or initial.tag or "latest")
    assert parameters is not None, "None only where newer_than is given"
    version = parameters.version
    origin = f"version {version} of {source}"
    info = _info_of(db.versions(policy_name), version, origin)
    shapes = shapes_in(info.metadata)
    if shapes is None:
        raise ConfigurationError(f"{FIELD}: {origin} does not have the names of its weights: an older rlsrl stored it")
    weights = NamedWeights(tensors=split(parameters.vector, shapes), statistics=parameters.statistics, header=None)
    return InitialWeights(
        origin=origin,
        version=str(version),
        weights=weights,
        state=None if initial.what == "weights" else _state(db.load_state(policy_name, version), origin),
    )


def _info_of(versions: Sequence[VersionInfo], version: Version, origin: str) -> VersionInfo:
    for info in versions:
        if info.version == version:
            return info
    raise ConfigurationError(f"{FIELD}: {origin} was removed while it was read; try again")


def _state(state: TrainerState | None, origin: str) -> TrainerState:
    if state is None:
        raise ConfigurationError(
            f"{FIELD}.what is all, and no state is stored with {origin}: trainers keep that of the newest version; "
            "allowed: weights, or a version with RESUMABLE yes in `rlsrl params list`"
        )
    return state

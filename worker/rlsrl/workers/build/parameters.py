"""Opens a run's parameter DB, wherever it is: the one place that knows the kinds of stores. Also for the CLI."""

from __future__ import annotations

from pathlib import Path

from rlsrl.api.resolved import ParameterStoreConfig
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.protocols import ParameterDB
from rlsrl.runtime.errors import ConfigurationError


def open_parameter_store(store: ParameterStoreConfig) -> ParameterDB:
    """The parameter DB there. Nothing is looked at yet; what fails, fails when it is used.

    Raises:
        ConfigurationError: the environment has no credentials, or a package is missing.
    """
    if store.folder is not None:
        return FilesystemParameterDB(Path(store.folder))
    place = store.object_store
    assert place is not None, "validation leaves exactly one"  # noqa: S101 - an invariant of our own
    try:
        from rlsrl.parameters.object_store import ObjectStoreParameterDB
        from rlsrl.parameters.objects import Objects
    except ImportError as error:
        raise ConfigurationError(
            f"parameters.store.objectStore needs `pip install 'rlsrl[objectstore]'`: {error}"
        ) from error
    objects = Objects.s3(place.url, endpoint=place.endpoint, region=place.region, answer_seconds=place.answer_seconds)
    return ObjectStoreParameterDB(objects)

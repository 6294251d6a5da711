"""Build the parts that store and carry weights. Only this module knows all kinds of stores and transports."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsrl.api.pods import SOURCE_ADDRESS_KEY, SOURCE_FOLDER_VARIABLE, SOURCE_TLS_NAME_KEY, SOURCE_TOKEN_KEY
from rlsrl.api.resolved import ActorConfig, ObjectStoreConfig, ParameterStoreConfig, PolicyWorkerConfig, TrainerConfig
from rlsrl.parameters.broadcast import BroadcastPublisher, BroadcastReader
from rlsrl.parameters.database import BlobParameterDB
from rlsrl.parameters.fan_out import FanOutPublisher
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.protocols import ParameterDB, ParameterPublisher, ParameterSource
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.runtime.extras import pip_install

if TYPE_CHECKING:
    import grpc

    from rlsrl.parameters.objects import Objects
    from rlsrl.parameters.service import ServiceParameterDB
    from rlsrl.rpc.tls import Tls


def open_parameter_store(
    store: ParameterStoreConfig, *, open_connection: Callable[[], grpc.Channel | None] = lambda: None
) -> ParameterDB:
    """Return the parameter database of a store. It connects to nothing yet.

    ``open_connection`` is that of ``ServiceParameterDB``, if the store is a service.

    Raises:
        ConfigurationError: the environment has no credentials, or a package is missing.
        TokenMissing: the store is a service, and the environment has no token.
        TlsUnusable: the store is a service, and the environment's certificates cannot be used.
    """
    if store.service is not None:
        from rlsrl.parameters.service import ServiceParameterDB
        from rlsrl.rpc.auth import token_from_environment
        from rlsrl.rpc.tls import tls_from_environment

        return ServiceParameterDB(
            store.service, token_from_environment(), tls=tls_from_environment(), open_connection=open_connection
        )
    return open_blobs(store)


def open_source(environ: Mapping[str, str] = os.environ) -> ServiceParameterDB:
    """Return the parameter database of the experiment from whose weights this one starts. It connects to nothing yet.

    Raises:
        ConfigurationError: the environment has no folder with the way to it.
        FileNotFoundError: the folder lacks a file.
        TlsUnusable: the environment's certificates cannot be used.
    """
    from rlsrl.parameters.service import ServiceParameterDB
    from rlsrl.rpc.tls import TLS_NAME_VARIABLE, tls_from_environment

    if not (place := environ.get(SOURCE_FOLDER_VARIABLE)):
        raise ConfigurationError(f"{SOURCE_FOLDER_VARIABLE} is not set: only the operator's pods have it")
    folder = Path(place)
    address, token = ((folder / key).read_text("ascii").strip() for key in (SOURCE_ADDRESS_KEY, SOURCE_TOKEN_KEY))
    try:
        tls_name = (folder / SOURCE_TLS_NAME_KEY).read_text("ascii").strip()
    except FileNotFoundError:
        return ServiceParameterDB(address, token)
    return ServiceParameterDB(address, token, tls=tls_from_environment({**environ, TLS_NAME_VARIABLE: tls_name}))


def open_blobs(store: ParameterStoreConfig) -> BlobParameterDB:
    """Return the parameter database of a store that is a folder or an object store. It connects to nothing yet.

    Raises:
        ConfigurationError: the environment has no credentials, or a package is missing.
    """
    if store.folder is not None:
        return FilesystemParameterDB(Path(store.folder))
    assert store.object_store is not None, "no other process serves this store"
    objects = open_objects(store.object_store)
    from rlsrl.parameters.object_store import ObjectStoreParameterDB

    return ObjectStoreParameterDB(objects)


def open_objects(place: ObjectStoreConfig) -> Objects:
    """Return the objects of an object store. It connects to nothing yet.

    Raises:
        ConfigurationError: the environment has no credentials, or a package is missing.
    """
    try:
        from rlsrl.parameters.objects import Objects
    except ImportError as error:
        raise ConfigurationError(f"parameters.store.objectStore needs {pip_install('objectstore')}: {error}") from error
    return Objects.s3(place.url, endpoint=place.endpoint, region=place.region, answer_seconds=place.answer_seconds)


def open_parameter_source(config: ActorConfig | PolicyWorkerConfig, token: str, tls: Tls | None) -> ParameterSource:
    """Return the source of the newest weights for a worker that acts."""
    if config.parameters_endpoint is not None:
        return BroadcastReader(config.parameters_endpoint, token)
    from rlsrl.parameters.service import LiveReader

    return LiveReader(config.coordinator_address, token, config.policy_name, tls=tls)


def open_parameter_publisher(
    config: TrainerConfig, token: str, tls: Tls | None, description: Mapping[str, Any]
) -> ParameterPublisher:
    """Return the publisher through which rank 0 publishes every version.

    Raises:
        OSError: the shared memory's name is taken: another trainer of the same run is alive.
    """
    publishers: list[ParameterPublisher] = []
    with ExitStack() as opened:
        if config.parameters_endpoint is not None:
            publishers.append(BroadcastPublisher(config.parameters_endpoint, token, description))
            opened.callback(publishers[-1].close)
        if config.publishes_live:
            from rlsrl.parameters.service import LivePublisher

            publishers.append(
                LivePublisher(config.coordinator_address, token, config.policy_name, description, tls=tls)
            )
        opened.pop_all()
    return FanOutPublisher(publishers)

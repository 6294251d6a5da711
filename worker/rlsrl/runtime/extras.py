"""The extras of rlsrl, and the one error for a package that is not installed. Imports the standard library alone."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

EXTRAS: Mapping[str, str] = {
    "numpy": "rpc",
    "grpc": "rpc",
    "google.protobuf": "rpc",
    "prometheus_client": "rpc",
    "safetensors": "rpc",
    "uvloop": "rpc",
    "gymnasium": "env",
    "httptools": "env",
    "torch": "torch",
    "rich": "local",
    "matplotlib": "local",
    "mujoco": "mujoco",
    "Box2D": "box2d",
    "ale_py": "atari",
    "cv2": "atari",
    "pygame": "video",
    "imageio_ffmpeg": "video",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "fastapi": "http",
    "starlette": "ui",
    "uvicorn": "ui",
    "aiohttp": "cluster-ui",
    "kubernetes": "cluster-ui",
    "obstore": "objectstore",
    "wandb": "wandb",
}
"""The extra that installs each module that rlsrl may import. Of several extras it is the smallest."""
TRAINING = ("rpc", "env", "torch", "local")
"""The extras for training on one machine."""
TRAINING_MODULES = (
    "torch", "gymnasium", "grpc", "google.protobuf", "numpy", "prometheus_client", "safetensors", "uvloop", "rich"
)  # fmt: skip
"""The modules that every training run imports. The others of these extras are optional."""


class NotInstalled(ModuleNotFoundError):
    """A package that rlsrl needs is not installed. The text says which extra installs it."""

    cure: str = ""
    """The command that installs it."""


def pip_install(*extras: str) -> str:
    """Return the command that installs the extras.

    >>> pip_install("rpc", "env")
    "pip install 'rlsrl[rpc,env]'"
    """
    return f"pip install 'rlsrl[{','.join(extras)}]'"


@contextmanager
def extras_named(extra: str | None = None) -> Iterator[None]:
    """Raise ``NotInstalled`` in place of the error about a missing package of an extra.

    Errors of imports in the user's own code stay as they are. ``extra`` is the one to name, if that is known: several
    extras install the same packages.
    """
    try:
        yield
    except NotInstalled:
        raise
    except ModuleNotFoundError as error:
        module = _missing_module(error)
        if module is None or not _is_imported_by_rlsrl(error):
            raise
        named = EXTRAS[module] if extra is None else extra
        hint = f" (training on this machine needs 'rlsrl[{','.join(TRAINING)}]')" if named in TRAINING else ""
        raise _not_installed([module], [named], hint=hint) from error


def require_for_training() -> None:
    """Check that the packages of every training run are installed. Imports none of them.

    Workers are processes of their own: without the check each of them would end with an error of its own.

    Raises:
        NotInstalled: some are not; the text names all of them.
    """
    missing = [module for module in TRAINING_MODULES if not is_installed(module)]
    if missing:
        raise _not_installed(missing, [extra for extra in TRAINING if extra in {EXTRAS[module] for module in missing}])


def _not_installed(modules: list[str], extras: list[str], *, hint: str = "") -> NotInstalled:
    cure = pip_install(*extras)
    what = f"the package {modules[0]!r} is" if len(modules) == 1 else f"the packages {', '.join(modules)} are"
    error = NotInstalled(f"{what} not installed; run: {cure}{hint}", name=modules[0])
    error.cure = cure
    return error


def _missing_module(error: ModuleNotFoundError) -> str | None:
    """Return the entry of ``EXTRAS`` that is missing, or None.

    The name is that of the package, such as ``google``. With another one, such as ``torch.new``, the package is there.
    """
    name = error.name or ""
    return next((module for module in EXTRAS if module == name or module.startswith(f"{name}.")), None)


def _is_imported_by_rlsrl(error: ModuleNotFoundError) -> bool:
    """Return whether the import that failed is in code of rlsrl."""
    importers = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [name for name in importers if name.partition(".")[0] != "importlib"]
    return bool(names) and names[-1].partition(".")[0] == "rlsrl"


def is_installed(module: str) -> bool:
    """Return whether a module could be imported. Imports nothing but its parents."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False

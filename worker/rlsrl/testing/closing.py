"""A base class of test doubles and tools that hold processes, threads or descriptors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class ClosedAtExit(ABC):
    """A context manager whose exit calls ``close``."""

    @abstractmethod
    def close(self) -> None:
        """Free all resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""The type of Kubernetes objects."""

from __future__ import annotations

from typing import Any

Manifest = dict[str, Any]
"""A Kubernetes object as JSON."""

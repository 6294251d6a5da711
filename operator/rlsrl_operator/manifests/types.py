"""What manifests are made of."""

from __future__ import annotations

from typing import Any

Manifest = dict[str, Any]
"""A Kubernetes object as JSON has it."""

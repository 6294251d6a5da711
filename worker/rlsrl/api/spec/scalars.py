"""Scalar types that several sections of the spec share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlsrl.api.model import INTEGRAL

LATEST = "latest"
VERSION_LIKE = r"[0-9]+[.][0-9]+"
"""Texts that name versions in a parameter store, so that no tag has them (``rlsrl.parameters.names``)."""
VersionText = Annotated[str, Field(pattern=r"^[0-9]{1,9}\.[0-9]{1,15}$", max_length=25, examples=["1.2500"])]
"""A stored version: attempt and step."""
Tag = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$", max_length=63, examples=["best"])]
"""A tag of a stored version."""
FilePath = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=1024, examples=["/models/best.safetensors"])]
"""A path of a file or folder."""
PositiveSeconds = Annotated[float, Field(gt=0, le=31_536_000)]
"""A duration above 0 and up to a year, in seconds."""
Count = Annotated[int, Field(ge=1, le=1_000_000_000_000_000), INTEGRAL]
"""A number of steps, at least 1."""
Attribute = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$",
        max_length=256,
        examples=["my_package.my_module:make"],
    ),
]
"""A Python attribute as ``package.module:attribute``."""
VectorActions = Literal["gaussian", "squashed", "clipped"]
"""How a policy draws actions that are vectors of floats: from a Gaussian, whose samples the environment's bounds cut;
as the tanh of such samples; or around means within the bounds, cut to these before anything sees them."""
NoiseColor = Literal["white", "pink"]
"""How noise changes from step to step: independently, or with slow changes as strong as fast ones."""
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=253, examples=["my-object"])]
"""The name of a Kubernetes object."""
VolumeSize = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}(Mi|Gi|Ti)$", max_length=8, examples=["50Gi"])]
"""The size of a volume."""
WhenDeleted = Literal["Retain", "Delete"]
"""What becomes of a volume when its experiment is deleted."""

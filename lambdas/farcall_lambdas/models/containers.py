"""Containers, in Globus Compute's words: ``type`` is the technology, ``location`` the image."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from farcall_lambdas.models.fields import Description, Name, Shape, Title

Technology = Annotated[str, Field(pattern="^[a-z][a-z0-9-]{0,39}$")]


class RegisterContainer(Shape):
    """``type`` is docker, podman, apptainer, singularity or the like; ``location`` is the name of the image there.
    Without a ``name`` its id is its name."""

    name: Name | Literal[""] = ""
    type: Technology
    location: Annotated[Title, Field(min_length=1)]
    description: Description | None = None


class ContainerRegistered(Shape):
    container_id: str


class ContainerEntry(Shape):
    """``created_at`` in epoch seconds."""

    container_uuid: str
    name: str
    type: str
    location: str
    description: str | None
    created_at: float | None


class ContainerAnswer(Shape):
    container: ContainerEntry


class ContainerList(Shape):
    containers: list[ContainerEntry]


class BuildStatus(Shape):
    """``status`` is "provided": images come from elsewhere, none is built here."""

    container_id: str
    status: str = "provided"

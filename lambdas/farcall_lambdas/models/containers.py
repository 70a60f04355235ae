"""Containers, in Globus Compute's words: ``type`` is the technology, ``location`` the image. And environments that a
request defines itself."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from farcall_common.environments import MAX_LOCATION, MAX_PRELOAD, MAX_REQUIREMENTS, TYPES, Environment
from farcall_lambdas.models.fields import Description, OptionalName, Shape, Text

Technology = Annotated[str, Field(max_length=40, json_schema_extra={"enum": list(TYPES)})]
Location = Annotated[Text, Field(max_length=MAX_LOCATION)]
Requirements = Annotated[
    list[Annotated[Text, Field(min_length=1, max_length=300)]], Field(fail_fast=True, max_length=MAX_REQUIREMENTS)
]
Modules = Annotated[list[Annotated[Text, Field(max_length=200)]], Field(fail_fast=True, max_length=MAX_PRELOAD)]


class _Definition(Shape):
    type: Technology
    location: Location = ""
    requirements: Requirements = Field(default_factory=list)
    preload: Modules | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.environment()
        return self

    def environment(self) -> Environment:
        """The definition, as tasks have it.

        :raises ValueError: if it is none.
        """
        fields = ("type", "location", "requirements", "preload", "name")
        return Environment.of({name: value for name in fields if (value := getattr(self, name, None)) is not None})


class EnvironmentShape(_Definition):
    """An environment for tasks. ``type`` is the technology; ``location`` is the image as that technology refers to one,
    the directory of a root file system (bubblewrap, charliecloud) or of a Python installation (venv, conda);
    ``requirements`` are packages that the endpoint installs (uv). ``preload``: modules that templates import, for
    the workers forked from them; without it, those that earlier tasks imported. An unknown field is refused: the tasks
    would run in another environment than the one meant."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[Text, Field(max_length=100)] = ""


class RegisterContainer(_Definition):
    """An environment, registered to be named by tasks and functions; see ``environment`` of a submit for its fields.
    Without a ``name`` its id is its name."""

    name: OptionalName = ""
    description: Description | None = None


class ContainerRegistered(Shape):
    container_id: str


class ContainerEntry(Shape):
    """``created_at`` in epoch seconds."""

    container_uuid: str
    name: str
    type: str
    location: str
    requirements: list[str]
    preload: list[str] | None
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

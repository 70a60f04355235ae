"""Environment variables of workers: what tasks of the owner and of other submitters get."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Collection, Mapping
from typing import Final

from farcall_common.credentials import CLIENT_VARIABLES, GLOBUS_CLIENT_VARIABLES, VARIABLES

SECRETS: Final = frozenset(
    {VARIABLES["token"], *(secret for _, secret in (*CLIENT_VARIABLES, *GLOBUS_CLIENT_VARIABLES))}
)
"""Credentials of the agent: no manager, no scheduler and no task gets them."""

PASSED: Final = (
    *("PATH", "LANG", "LANGUAGE", "LC_*", "TZ", "USER", "LOGNAME", "SHELL", "TERM", "COLUMNS", "LINES"),
    *("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "MANPATH", "PKG_CONFIG_PATH", "PYTHON*", "VIRTUAL_ENV*", "CONDA_*"),
    *("MODULE*", "LMOD_*", "LOADEDMODULES", "_LMFILES_", "EBROOT*", "EBVERSION*", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("SLURM_*", "PBS_*", "LSB_*", "SGE_*", "PE_*", "JOB_ID", "NSLOTS", "_CONDOR_*", "HYDRA_*", "PMI*", "PALS_*"),
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "OMPI_*", "I_MPI_*", "MPICH_*", "UCX_*", "FI_*"),
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "ROCR_*", "ROCM_*", "HIP_*", "ZE_*", "XLA_*", "FARCALL_*", "COVERAGE_*"),
)
"""Variables that tasks of submitters other than the owner get."""
_REFUSED: Final = (
    *("*_JWT", "*_PAT", "*TOKEN*", "*SECRET*", "*PASS*", "*CREDENTIAL*", "*KEY*", "*AUTH*"),
    "FARCALL_FLEET_*",
)
"""Exceptions to :data:`PASSED`: ``SLURM_JWT``, for example, lets its holder submit jobs."""

_OF_RUNNERS: Final = dict.fromkeys(
    ("docker", "podman", "podman-hpc"),
    (
        *("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_TLS*", "DOCKER_CERT_PATH"),
        *("CONTAINER_HOST", "HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
    ),
)
"""Variables that the programs of technologies need besides those of tasks."""

_OF_NODE: Final = (
    *("PATH", "SHELL", "HOME", "PWD", "OLDPWD", "SHLVL", "_", "TMPDIR", "TMP", "TEMP", "XDG_*", "DBUS_*", "SSH_*"),
    *("LD_*", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "MANPATH", "INFOPATH"),
    *("PKG_CONFIG_PATH", "PYTHON*", "VIRTUAL_ENV*", "CONDA_*", "_CE_*", "MODULE*", "LMOD_*", "__LMOD_*"),
    *("LOADEDMODULES", "_LMFILES_", "EBROOT*", "EBVERSION*", "SSL_CERT_*", "BASH_*", "APPTAINER*", "SINGULARITY*"),
    *("GLIBC_TUNABLES", "COVERAGE_*"),
)
"""Variables that describe the node's own software: in an image, they are wrong."""


def for_image(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that make sense in an image, whose own are set besides."""
    of_node = _pattern(_OF_NODE)
    return {name: value for name, value in environment.items() if not of_node.match(name)}


def for_submitter(environment: Mapping[str, str], *, passed: Collection[str] = ()) -> dict[str, str]:
    """The variables for tasks of a submitter other than the owner.

    :param passed: further names, in which ``*`` stands for any characters.
    """
    wanted, refused, chosen = (_pattern(tuple(names)) for names in (PASSED, _REFUSED, passed))
    return {
        name: value
        for name, value in environment.items()
        if chosen.match(name) or (wanted.match(name) and not refused.match(name))
    }


def is_secret(name: str) -> bool:
    """Whether the value of a variable may be a secret, by its name."""
    return _pattern(_REFUSED).match(name) is not None


def for_runner(technology: str, environment: Mapping[str, str], *, passed: Collection[str] = ()) -> dict[str, str]:
    """The variables for the program that starts a container for a submitter other than the owner: those of its tasks,
    and for Docker and Podman where their daemon, configuration and storage are. Their containers see neither."""
    return for_submitter(environment, passed=(*passed, *_OF_RUNNERS.get(technology, ())))


@functools.lru_cache(maxsize=64)
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, names)) or "(?!)")

"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from checkpoints import Checkpoints
from serving import Engines
from standin.run import Standin


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("engines"))
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standin]:
    """Runs small programs over the stand-in CUDA driver."""
    built = Standin(tmp_path_factory.mktemp("standin"))
    yield built
    built.close()

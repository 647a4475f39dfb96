"""JAXREWARD_TEST_MESH=1,4,2 places every model that the tests load on a mesh of (data, fsdp, tensor)."""

import functools
import os

import pytest

from jaxreward import parallel
from jaxreward.models import weights


@pytest.fixture(scope="session", autouse=True)
def mesh_of_the_environment():
    sizes = os.environ.get("JAXREWARD_TEST_MESH")
    if sizes is None:
        yield
        return
    mesh = parallel.make_mesh(*map(int, sizes.split(",")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "load", functools.partial(weights.load, mesh=mesh))
        yield

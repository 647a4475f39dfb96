"""Environments by name: what is parsed, what is built, and that nothing else is imported."""

import subprocess
import sys

import jax
import pytest

from jaxreward.envs import registry
from jaxreward.envs.base import Environment
from jaxreward.envs.brax import BraxConfig
from jaxreward.envs.gymnasium import GymnasiumConfig
from jaxreward.envs.gymnax import GymnaxConfig
from jaxreward.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("gymnax:Pendulum-v1", GymnaxConfig("Pendulum-v1")),
        ("gymnax", GymnaxConfig()),
        ("brax:hopper", BraxConfig("hopper")),
        ("gymnasium:Acrobot-v1", GymnasiumConfig("Acrobot-v1")),
        ("gymnasium:my.module:Game-v0", GymnasiumConfig("my.module:Game-v0")),
    ],
)
def test_parse(text, config):
    assert registry.parse(text) == config


def test_parse_levels():
    assert registry.parse("catrap:3").level == "3"
    assert registry.parse("cartridge:3").level == "3"


@pytest.mark.parametrize("text", ["gymnax:CartPole-v1", "brax:fast", "gymnasium:CartPole-v1", "catrap:1"])
def test_make(text):
    environment = registry.make(registry.parse(text))
    assert isinstance(environment, Environment)
    _, timestep = jax.jit(environment.reset)(jax.random.key(0))
    assert timestep.first.all() and timestep.first.shape == (environment.spec.num_envs,)
    if not environment.on_device:
        environment.close()


def test_unknown_kinds_are_errors_with_the_nearest():
    with pytest.raises(ConfigError, match=r"no kind of environment 'gymnaz'.*gymnax"):
        registry.parse("gymnaz:CartPole-v1")
    with pytest.raises(ConfigError, match=r"parse"):
        registry.make("gymnax:CartPole-v1")
    with pytest.raises(ConfigError, match=r"'dict'.*BraxConfig"):
        registry.make({"name": "hopper"})


def test_parsing_imports_no_simulator():
    code = (
        "import sys; from jaxreward.envs import registry\n"
        "for kind in ('gymnax:x', 'brax:x', 'gymnasium:x'): registry.parse(kind)\n"
        "print([name for name in ('gymnax', 'brax', 'gymnasium', 'mujoco', 'pyboy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_workers_import_no_jax():
    code = "import sys, jaxreward.envs.gymnasium_worker; print('jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"

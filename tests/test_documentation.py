"""What the README says: its commands parse against the code, and its links lead somewhere."""

import pathlib
import re
import shlex

import pytest

from jaxreward.command_line import dataclass_types, override, parse
from jaxreward.envs import registry
from jaxreward.play import PlayConfig
from jaxreward.train import find_config, read_arguments
from jaxreward.training.demonstrate import DemonstrateConfig
from jaxreward.training.experiment import ExperimentConfig
from jaxreward.training.run_folder import create, read_config

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"python -m jaxreward\.(\w+) ([^#\n]*)", README)


@pytest.mark.parametrize(("module", "text"), COMMANDS)
def test_commands_of_the_readme_parse(module, text, tmp_path):
    words = shlex.split(text)
    if module == "play":
        parse(PlayConfig, words, "play", "")
    elif module == "demonstrations":
        parse(DemonstrateConfig, words, "demonstrations", "")
    else:
        assert module == "train"
        arguments = read_arguments(words)
        if arguments.config == "RUN/config.json":
            run = create(tmp_path, "catrap_rta", find_config("catrap_rta")[1])
            assert read_config(run.config, dataclass_types(ExperimentConfig))[0] == "catrap_rta"
        elif arguments.config is not None and not arguments.help:
            if arguments.env is not None:
                registry.parse(arguments.env)
            override(find_config(arguments.config)[1], arguments.fields, "train")
        else:
            assert arguments.list or arguments.help or arguments.resume == "RUN"


def test_the_readme_shows_its_main_command():
    assert len(COMMANDS) >= 10 and ("train", "--config=catrap_rta") in [(m, t.strip()) for m, t in COMMANDS]


@pytest.mark.parametrize(
    "page",
    ["README.md", "BUILD.md", "docs/decisions.md", "docs/levels.md", "docs/models.md", "docs/scaling.md"],
)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"


def test_fields_in_the_decisions_exist():
    config = find_config("catrap_rta")[1]
    text = (ROOT / "docs/decisions.md").read_text()
    for part, field in re.findall(r"`(reward|rank|agent|loop)\.(\w+)[ `]", text):
        assert hasattr(getattr(config, part), field), f"{part}.{field}"

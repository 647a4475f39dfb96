"""Named experiments as frozen dataclasses; each module holds a family, CONFIGS finds them by name."""

from jaxreward.configs import baselines, catrap
from jaxreward.training.experiment import ExperimentConfig

CONFIGS: dict[str, ExperimentConfig] = {**catrap.CONFIGS, **baselines.CONFIGS}

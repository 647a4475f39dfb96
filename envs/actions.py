"""Actions between this project's spaces and a simulator's own."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxreward.errors import ConfigError
from jaxreward.types import Array, Box


@dataclasses.dataclass(frozen=True, eq=False)
class BoxActions:
    """Maps actions of a Box to a simulator's real-valued actions, clipping those outside of it.

    Attributes:
      space: the Box that agents see: the simulator's own where all its components have the same bounds,
        [-1, 1] otherwise.
      low: float32 [*shape], the simulator's lowest actions.
      high: float32 [*shape], the simulator's highest actions.
    """

    space: Box
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, name: str, low: np.ndarray | float, high: np.ndarray | float, shape: tuple[int, ...]):
        """Builds the map from a simulator's bounds.

        Args:
          name: the environment, for error messages.
          low: the lowest actions, broadcastable to `shape`.
          high: the highest actions, likewise.
          shape: one action's shape.

        Raises:
          ConfigError: a bound is infinite.
        """
        shape = tuple(shape)
        low = np.broadcast_to(np.asarray(low, np.float32), shape)
        high = np.broadcast_to(np.asarray(high, np.float32), shape)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ConfigError(
                f"{name} has actions without bounds ({low.tolist()} to {high.tolist()}), but every "
                f"real-valued action needs finite ones; wrap the environment so that its actions are bounded"
            )
        uniform = np.ptp(low) == 0 and np.ptp(high) == 0
        space = Box(float(low.flat[0]), float(high.flat[0]), shape) if uniform else Box(-1.0, 1.0, shape)
        return cls(space=space, low=low, high=high)

    def to_simulator(self, action: Array | np.ndarray) -> Array | np.ndarray:
        """Clips to `space` and maps to the simulator's bounds; NumPy in, NumPy out, and JAX likewise.

        Args:
          action: float32 [..., *shape].
        """
        action = action.clip(self.space.low, self.space.high)
        if (self.space.low, self.space.high) == (self.low.flat[0], self.high.flat[0]) and np.ptp(
            self.low
        ) == 0:
            return action
        share = (action - self.space.low) / (self.space.high - self.space.low)
        return self.low + share * (self.high - self.low)

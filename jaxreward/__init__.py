"""jaxreward: control policies from video and language, without environment reward, in JAX."""

__version__ = "0.1.0"

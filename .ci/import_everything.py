"""Imports every module of the installed package; run it outside of the repository."""

import importlib
import pkgutil
import sys

import jaxreward


def main() -> None:
    """Imports all modules and prints their number and the versions they met."""
    names = [module.name for module in pkgutil.walk_packages(jaxreward.__path__, "jaxreward.")]
    for name in names:
        importlib.import_module(name)
    jax = sys.modules["jax"]
    print(f"{len(names)} modules import on Python {sys.version.split()[0]} with jax {jax.__version__}")


if __name__ == "__main__":
    main()

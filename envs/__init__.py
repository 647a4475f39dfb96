"""Environments: the protocol, pure-JAX games, and adapters to host simulators."""

if __name__ != "jaxreward.envs":
    raise ImportError(
        "import this package as jaxreward.envs: under its bare name every class would exist twice "
        "(run 'pip install -e .' in the repository root if jaxreward.envs cannot be found)"
    )

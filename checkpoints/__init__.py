"""Saving and resuming runs, and the small scorers that ship with the package."""

if __name__ != "jaxreward.checkpoints":
    raise ImportError(
        "import this package as jaxreward.checkpoints: under its bare name every class would exist twice "
        "(run 'pip install -e .' in the repository root if jaxreward.checkpoints cannot be found)"
    )

"""Learners: PPO, GRPO and their networks, buffers and advantage estimators."""

if __name__ != "jaxreward.agents":
    raise ImportError(
        "import this package as jaxreward.agents: under its bare name every class would exist twice "
        "(run 'pip install -e .' in the repository root if jaxreward.agents cannot be found)"
    )

"""The on-policy buffer hands on what it was given, once."""

from jaxreward.agents.buffers import OnPolicy


def test_on_policy_is_the_identity_and_forgets():
    buffer, rollout, rewards = OnPolicy(), object(), {"reward": object()}
    state = buffer.init()
    state, experience = buffer.sample(buffer.add(state, rollout, rewards))
    assert experience.rollout is rollout and experience.rewards is rewards
    assert state == buffer.init() == ()

"""gymnasium environments keep the contract and step exactly as gymnasium itself does."""

import textwrap

import gymnasium
import jax
import numpy as np
import pytest

from jaxreward.envs.gymnasium import GymnasiumConfig, make
from jaxreward.envs.testing import check_environment
from jaxreward.errors import ConfigError, SimulatorError
from jaxreward.types import Box, Discrete

GAMES = """
    import gymnasium
    import numpy as np

    class Corridor(gymnasium.Env):
        '''Walk right to 3; every random number of an episode is drawn at its start.'''

        metadata = {"render_modes": ["rgb_array"]}
        observation_space = gymnasium.spaces.Dict(
            {"place": gymnasium.spaces.Discrete(5), "noise": gymnasium.spaces.Box(-1, 1, (2,), np.float64)}
        )
        action_space = gymnasium.spaces.Discrete(2, start=-1)

        def __init__(self, render_mode=None, fail_at=99):
            self.render_mode, self.fail_at = render_mode, fail_at

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.place, self.noise = 0, self.np_random.uniform(-1, 1, 2)
            return {"place": self.place, "noise": self.noise}, {}

        def step(self, action):
            print("games may print what they like")
            if action not in (-1, 0):
                raise ValueError(f"no such action {action}")
            self.place += int(action) + 1
            if self.place == self.fail_at:
                raise RuntimeError("the corridor caved in")
            won = self.place == 3
            return {"place": self.place, "noise": self.noise}, float(won), won, False, {"is_success": won}

        def render(self):
            picture = np.zeros((20, 40, 3), np.uint8)
            picture[:, 8 * self.place : 8 * (self.place + 1)] = (255, 0, 100)
            return picture

    class Arm(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0, 255, (6, 7, 3), np.uint8)
        action_space = gymnasium.spaces.Box(np.array([-1, 0], np.float32), np.array([1, 8], np.float32))

        def __init__(self, render_mode=None):
            self.render_mode = render_mode

        def reset(self, *, seed=None, options=None):
            return np.zeros((6, 7, 3), np.uint8), {}

        def step(self, action):
            return np.full((6, 7, 3), action[1], np.uint8), float(action[0]), False, False, {}

    gymnasium.register("Corridor-v0", Corridor, max_episode_steps=6)
    gymnasium.register("Arm-v0", Arm)
"""


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    folder = tmp_path_factory.mktemp("games")
    (folder / "tiny_games.py").write_text(textwrap.dedent(GAMES))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield "tiny_games"


@pytest.fixture
def made():
    environments = []

    def make_one(**settings):
        environments.append(make(GymnasiumConfig(**settings)))
        return environments[-1]

    yield make_one
    for environment in environments:
        environment.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_contract(made, games, workers):
    check_environment(made(id="CartPole-v1", num_envs=5, workers=workers, max_episode_steps=20), steps=45)
    corridor = made(id=f"{games}:Corridor-v0", num_envs=3, workers=workers, render=True)
    played = check_environment(corridor, steps=40)
    assert played.terminated.any() and played.truncated.any()


@pytest.mark.parametrize(("id", "workers"), [("CartPole-v1", 0), ("Pendulum-v1", 0), ("CartPole-v1", 2)])
def test_steps_are_those_of_gymnasium(made, id, workers):
    num_envs, limit = 3, 20
    host = made(id=id, num_envs=num_envs, workers=workers, max_episode_steps=limit).host
    raw = [gymnasium.make(id, max_episode_steps=limit) for _ in range(num_envs)]
    handles, seeds = np.arange(num_envs, dtype=np.int32), np.array([5, 6, 7], np.uint32)
    first = host.reset(handles, seeds)
    starts = np.stack([env.reset(seed=int(seed))[0] for env, seed in zip(raw, seeds, strict=True)])
    np.testing.assert_array_equal(first.observation, starts.astype(np.float32))

    generator = np.random.default_rng(0)
    ended = 0
    for _ in range(70):
        if isinstance(host.spec.action_space, Discrete):
            action = generator.integers(0, 2, num_envs).astype(np.int32)
        else:
            action = generator.uniform(-3, 3, (num_envs, 1)).astype(np.float32)
        step = host.step(handles, action)
        for i, env in enumerate(raw):
            raw_action = int(action[i]) if action.ndim == 1 else action[i]
            observation, reward, terminated, truncated, _ = env.step(raw_action)
            np.testing.assert_array_equal(step.final_observation[i], observation.astype(np.float32))
            np.testing.assert_allclose(step.env_reward[i], reward, rtol=1e-6)
            assert (step.terminated[i], step.truncated[i]) == (terminated, truncated and not terminated)
            if terminated or truncated:
                ended += 1
                observation, _ = env.reset()
                assert step.first[i] and step.episode_step[i] == 0
            np.testing.assert_array_equal(step.observation[i], observation.astype(np.float32))
    assert ended > num_envs


def test_some_of_the_environments_can_step_alone(made):
    host = made(id="CartPole-v1", num_envs=4, workers=2).host
    everyone = np.arange(4, dtype=np.int32)
    host.reset(everyone, np.arange(4, dtype=np.uint32))
    some = np.array([3, 1], np.int32)
    one = host.step(some, np.array([1, 0], np.int32))
    both = host.step(everyone, np.zeros(4, np.int32))
    assert one.episode_step.tolist() == [1, 1]
    assert both.episode_step.tolist() == [1, 2, 1, 2]


def test_the_winning_frame_is_the_final_one(made, games):
    host = made(id=f"{games}:Corridor-v0", num_envs=1, render=True, frame_size=(0, 0)).host
    assert host.spec.image_shape == (20, 40, 3) and host.spec.max_episode_steps == 6
    assert host.spec.observation.shape == (7,) and host.spec.action_space == Discrete(2)
    handles = np.zeros(1, np.int32)
    first = host.reset(handles, np.zeros(1, np.uint32))
    for place in (1, 2, 3):
        step = host.step(handles, np.ones(1, np.int32))
        assert np.flatnonzero(step.final_frame[0, 0, :, 0]).tolist() == list(range(8 * place, 8 * place + 8))
    assert step.terminated[0] and step.info["success"][0] and step.env_reward[0] == 1
    assert np.flatnonzero(step.frame[0, 0, :, 0]).tolist() == list(range(8))
    # gymnasium flattens a Dict in the order of its keys: the noise, then the place as one-hot.
    assert step.final_observation[0, 2:].tolist() == [0, 0, 0, 1, 0]
    assert step.observation[0, 2:].tolist() == [1, 0, 0, 0, 0]
    assert (step.observation[0, :2] != first.observation[0, :2]).all(), "the next episode starts elsewhere"


def test_pictures_are_resized(made, games):
    environment = made(id=f"{games}:Corridor-v0", num_envs=1, render=True, frame_size=(10, 20))
    step = environment.host.reset(np.zeros(1, np.int32), np.zeros(1, np.uint32))
    assert step.frame.shape == (1, 10, 20, 3)
    expected = np.zeros((10, 20, 3), np.uint8)
    expected[:, :4] = (255, 0, 100)
    np.testing.assert_array_equal(environment.render(step.frame)[0], expected)


def test_bounds_that_differ_are_scaled(made, games):
    host = made(id=f"{games}:Arm-v0", num_envs=2, max_episode_steps=5).host
    assert host.spec.action_space == Box(-1.0, 1.0, (2,))
    assert host.spec.observation.dtype == np.uint8 and host.spec.image_shape == (6, 7, 3)
    handles = np.arange(2, dtype=np.int32)
    host.reset(handles, np.zeros(2, np.uint32))
    step = host.step(handles, np.array([[0.5, 0.0], [-9.0, 9.0]], np.float32))
    np.testing.assert_allclose(step.env_reward, [0.5, -1.0])
    assert step.observation[:, 0, 0, 0].tolist() == [4, 8]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failing_game_is_a_simulator_error(made, games, workers):
    host = made(id=f"{games}:Corridor-v0", num_envs=2, workers=workers, arguments=(("fail_at", 2),)).host
    handles = np.arange(2, dtype=np.int32)
    host.reset(handles, np.zeros(2, np.uint32))
    host.step(handles, np.ones(2, np.int32))
    with pytest.raises(SimulatorError, match="the corridor caved in"):
        host.step(handles, np.ones(2, np.int32))
    with pytest.raises(SimulatorError, match="were closed"):
        host.step(handles, np.ones(2, np.int32))


def test_a_killed_worker_is_a_simulator_error(made):
    host = made(id="CartPole-v1", num_envs=2, workers=1).host
    handles = np.arange(2, dtype=np.int32)
    host.reset(handles, np.zeros(2, np.uint32))
    host._members[0]._process.kill()
    with pytest.raises(SimulatorError, match="killed by signal 9"):
        host.step(handles, np.zeros(2, np.int32))


def test_inside_jit_equals_the_plain_loop(made):
    environment = made(id="CartPole-v1", num_envs=3, max_episode_steps=15)
    actions = jax.random.randint(jax.random.key(1), (30, 3), 0, 2)

    @jax.jit
    def scanned(key):
        state, _ = environment.reset(key)
        return jax.lax.scan(environment.step, state, actions)

    state, inside = scanned(jax.random.key(0))
    environment.raise_if_failed(state)
    inside = jax.device_get(inside)
    environment.host_reset(jax.random.key(0))
    for t, action in enumerate(np.asarray(actions)):
        step = environment.host_step(action)
        np.testing.assert_array_equal(step.observation, inside.observation[t])
        np.testing.assert_array_equal(step.truncated, inside.truncated[t])


def test_unusable_settings_are_errors(games):
    for settings, message in [
        ({"id": "CartPole-v7"}, r"'CartPole-v7'.*CartPole-v1"),
        ({"id": "no_such_module:CartPole-v1"}, r"module of 'no_such_module:CartPole-v1'"),
        ({"id": "Blackjack-v1"}, r"set max_episode_steps"),
        ({"id": f"{games}:Arm-v0", "max_episode_steps": 3, "render": True}, r"cannot draw pictures"),
        ({"num_envs": 0}, r"num_envs is 0"),
        ({"num_envs": 2, "workers": 3}, r"workers is 3"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make(GymnasiumConfig(**settings))
    with pytest.raises(SimulatorError, match="unexpected keyword argument 'nonsense'"):
        make(GymnasiumConfig(arguments=(("nonsense", 1),)))

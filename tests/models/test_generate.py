"""Generation against a loop without cache, batch or padding, against PyTorch, and against SciPy."""

import dataclasses
import functools
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from scipy import special, stats

from jaxreward.errors import ConfigError, ModelError
from jaxreward.models import weights
from jaxreward.models.decoder import Decoder, DecoderConfig
from jaxreward.models.generate import (
    Buckets,
    GenerateConfig,
    Generator,
    decode,
    generate,
    log_probabilities,
    pad_prompts,
    prefill,
)
from jaxreward.models.vision_language import ImageFeatures, Prompts, VisionLanguageModel

CONFIG = DecoderConfig(
    vocabulary=64,
    width=32,
    mlp_width=48,
    layers=3,
    heads=4,
    kv_heads=2,
    head_width=8,
    rope_sections=(2, 1, 1),
)
IMAGE_TOKEN = 63
GOLDEN = Path(__file__).parent / "golden"


class Tiny(nn.Module):
    """A decoder that takes image features as Qwen3-VL does, DeepStack included."""

    config: DecoderConfig = CONFIG

    def setup(self):
        self.decoder = Decoder(self.config)

    @property
    def decoder_config(self):
        return self.config

    def encode_images(self, images):
        return ImageFeatures(images)

    def embed(self, tokens, image_rows, features):
        embeddings = self.decoder.embed(tokens)
        if features is None:
            return embeddings, None
        image = image_rows >= 0
        rows = features.rows[jnp.maximum(image_rows, 0)]
        extra = features.extra[:, jnp.maximum(image_rows, 0)] * image[..., None]
        return jnp.where(image[..., None], rows, embeddings), extra

    def __call__(self, embeddings, positions, where, cache=None, *, empty=True, extra=None, branches=None):
        return self.decoder(embeddings, positions, where, cache, empty=empty, extra=extra, branches=branches)

    def logits(self, hidden):
        return self.decoder.logits(hidden)

    def everything(self, tokens, positions, where, image_rows, features):
        embeddings, extra = self.embed(tokens, image_rows, features)
        return self.logits(self(embeddings, positions, where, extra=extra)[0])


MODEL = Tiny()
FEATURES = ImageFeatures(
    jax.random.normal(jax.random.key(5), (6, 32)) * 0.3, jax.random.normal(jax.random.key(6), (2, 6, 32))
)
# Prompt by prompt: tokens, their image rows, positions (in an image the three axes part), the next position.
RAW = [
    (
        [3, 63, 63, 63, 63, 9, 12],
        [-1, 0, 1, 2, 3, -1, -1],
        [[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]],
        5,
    ),
    ([7, 1, 4, 22], [-1, -1, -1, -1], [[0, 1, 2, 3]] * 3, 4),
    ([63, 63, 40], [4, 5, -1], [[0, 0, 2], [0, 0, 2], [0, 1, 2]], 3),
]
GREEDY = GenerateConfig(temperature=0.0, max_new_tokens=6)


def prompts_of(raw, length=7):
    """Pads by hand, apart from the code under test."""
    count = len(raw)
    prompts = Prompts(
        tokens=np.zeros((count, length), np.int32),
        where=np.zeros((count, length), bool),
        positions=np.zeros((3, count, length), np.int32),
        next_position=np.asarray([one[3] for one in raw], np.int32),
        image_rows=np.full((count, length), -1, np.int32),
    )
    for row, (tokens, image_rows, positions, _) in enumerate(raw):
        start = length - len(tokens)
        prompts.tokens[row, start:] = tokens
        prompts.where[row, start:] = True
        prompts.positions[:, row, start:] = positions
        prompts.image_rows[row, start:] = image_rows
    return prompts


PROMPTS = prompts_of(RAW)


# These programs run for less time than it takes to optimise them.
jit = functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})


@jit
def all_logits(model, variables, tokens, positions, where, image_rows, features):
    arguments = (tokens, positions, where, image_rows, features)
    return model.apply(variables, *arguments, method="everything")


def naive_logits(variables, raw, completion, model=MODEL):
    """float64 [len(completion) + 1, V]: logits after the prompt and each token; one sequence, no cache."""
    tokens, image_rows, positions, following = raw
    count, room = len(tokens) + len(completion), 16 - len(tokens) - len(completion)
    after = following + np.arange(16 - len(tokens))
    logits = all_logits(
        model,
        variables,
        np.asarray([[*tokens, *completion, *[0] * room]], np.int32),
        np.concatenate([positions, np.broadcast_to(after, (3, after.size))], 1)[:, None].astype(np.int32),
        np.arange(16)[None] < count,
        np.asarray([[*image_rows, *[-1] * (16 - len(tokens))]], np.int32),
        FEATURES,
    )
    return np.asarray(logits[0, len(tokens) - 1 : count], np.float64)


def naive_greedy(variables, raw, count):
    completion = []
    for _ in range(count):
        completion.append(int(np.argmax(naive_logits(variables, raw, completion)[-1])))
    return completion


@pytest.fixture(scope="module", autouse=True)
def exact():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def variables():
    initial = jax.jit(functools.partial(MODEL.init, method="everything"))(
        jax.random.key(0), PROMPTS.tokens, PROMPTS.positions, PROMPTS.where, PROMPTS.image_rows, FEATURES
    )
    return jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, initial)


@pytest.fixture(scope="module")
def run():
    return jit(generate)


PREFILL = jit(prefill)
DECODE = jit(decode)
SCORE = jit(log_probabilities, static_argnames=("forbidden_tokens", "chunk"))


def test_the_tiny_model_offers_what_generation_needs():
    assert isinstance(MODEL, VisionLanguageModel)


def test_greedy_completions_are_those_of_a_loop_without_cache(variables, run):
    found = run(MODEL, variables, PROMPTS, FEATURES, jax.random.key(0), GREEDY)
    expected = [naive_greedy(variables, raw, 6) for raw in RAW]
    assert np.asarray(found.tokens).tolist() == expected
    assert np.asarray(found.lengths).tolist() == [6, 6, 6] and not np.asarray(found.stopped).any()
    assert len({tuple(row) for row in expected}) == 3
    for row, raw in enumerate(RAW):
        logits = naive_logits(variables, raw, expected[row])[:-1]
        plain = special.log_softmax(logits, -1)[np.arange(6), expected[row]]
        np.testing.assert_allclose(found.log_probabilities[row], plain, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llama"])
def test_greedy_completions_are_those_of_pytorch(run, family):
    """The tiny models of golden/, images and DeepStack included, further padded here."""
    model, golden = weights.load(GOLDEN / family), np.load(GOLDEN / family / "golden.npz")
    module, tokens, where = model.architecture.module, golden["tokens"], golden["where"]
    positions = np.broadcast_to(np.maximum(np.cumsum(where, 1) - 1, 0), (3, *where.shape))
    image, features = np.zeros(tokens.shape, bool), None
    if "vision" in golden:
        positions, image = golden["positions"], tokens == module.config.image_token
        extra = jnp.asarray(golden["deepstack"]) if "deepstack" in golden else None
        features = ImageFeatures(jnp.asarray(golden["vision"]), extra)
    following = golden["next_position"] if "next_position" in golden else where.sum(1)
    rows = np.where(image, np.cumsum(image).reshape(image.shape) - 1, -1)
    prompts = Prompts(*(x.astype(np.int32) for x in (tokens, where, positions, following, rows)))
    prompts = pad_prompts(prompts.replace(where=where), 3, tokens.shape[1] + 3)
    expected = golden["generated" if "generated" in golden else "greedy"]
    config = GenerateConfig(temperature=0.0, max_new_tokens=expected.shape[1])
    found = run(module, model.params, prompts, features, jax.random.key(0), config)
    np.testing.assert_array_equal(found.tokens[:2], expected)


def test_the_images_matter(variables, run):
    other = FEATURES.replace(rows=FEATURES.rows[::-1])
    found, changed = (
        run(MODEL, variables, PROMPTS, features, jax.random.key(0), GREEDY) for features in (FEATURES, other)
    )
    difference = np.abs(np.asarray(found.log_probabilities - changed.log_probabilities))[:, 0]
    assert (difference[[0, 2]] > 1e-3).all() and difference[1] < 1e-5


def test_more_padding_changes_nothing(variables, run):
    config = GenerateConfig(temperature=0.9, max_new_tokens=6, samples=2)
    found = run(MODEL, variables, PROMPTS, FEATURES, jax.random.key(1), config)
    padded = pad_prompts(PROMPTS, 5, 12)
    again = run(MODEL, variables, padded, FEATURES, jax.random.key(1), config)
    np.testing.assert_array_equal(found.tokens, again.tokens[:6])
    np.testing.assert_allclose(found.log_probabilities, again.log_probabilities[:6], atol=1e-5)
    assert not np.asarray(again.lengths[6:]).any() and not np.asarray(again.stopped[6:]).any()
    back = pad_prompts(padded, 5, 7)
    jax.tree.map(np.testing.assert_array_equal, back, pad_prompts(PROMPTS, 5, 7))


def test_wrong_positions_of_new_tokens_would_be_noticed(variables, run):
    found = run(MODEL, variables, PROMPTS, FEATURES, jax.random.key(0), GREEDY)
    late = PROMPTS.replace(next_position=PROMPTS.next_position + 1)
    wrong = run(MODEL, variables, late, FEATURES, jax.random.key(0), GREEDY)
    assert np.abs(np.asarray(found.log_probabilities - wrong.log_probabilities)[:, 1:]).max() > 1e-3


def test_recorded_log_probabilities_are_those_of_one_pass(variables, run):
    config = GenerateConfig(
        temperature=0.7,
        max_new_tokens=6,
        samples=3,
        stop_tokens=(5, 17, 29, 33),
        forbidden_tokens=(63, 62, 11),
    )
    found = run(MODEL, variables, PROMPTS, FEATURES, jax.random.key(3), config)
    assert 0 < np.asarray(found.stopped).sum() < 9
    arguments = (MODEL, variables, PROMPTS, FEATURES, found.tokens, found.where)
    again = SCORE(*arguments, temperature=0.7, forbidden_tokens=(63, 62, 11), chunk=4)
    np.testing.assert_allclose(found.log_probabilities, again, atol=2e-5)
    for row in range(9):
        length, completion = int(found.lengths[row]), np.asarray(found.tokens[row]).tolist()
        logits = naive_logits(variables, RAW[row // 3], completion[:length])[:-1] / 0.7
        logits[:, [63, 62, 11]] = -np.inf
        plain = special.log_softmax(logits, -1)[np.arange(length), completion[:length]]
        np.testing.assert_allclose(found.log_probabilities[row, :length], plain, atol=2e-5)
    for wrong in ({"temperature": 1.0, "forbidden_tokens": (63, 62, 11)}, {"temperature": 0.7}):
        assert np.abs(np.asarray(SCORE(*arguments, **wrong, chunk=4) - again)).max() > 1e-3


def test_samples_follow_the_softmax_and_forbidden_tokens_never_appear(variables, run):
    forbidden, count, temperature = (1, 8, 63), 6000, 1.3
    config = GenerateConfig(temperature, max_new_tokens=2, samples=count, forbidden_tokens=forbidden)
    one = prompts_of(RAW[:1])
    tokens = np.asarray(run(MODEL, variables, one, FEATURES, jax.random.key(7), config).tokens)
    assert not np.isin(tokens, forbidden).any()

    def check(sampled, completion):
        logits = naive_logits(variables, RAW[0], completion)[-1] / temperature
        logits[list(forbidden)] = -np.inf
        expected = special.softmax(logits) * sampled.size
        rare = expected < 5
        observed = np.bincount(sampled, minlength=64)
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
        assert (
            expected.size > 5
            and stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 1e-3
        )

    check(tokens[:, 0], [])
    common = int(np.bincount(tokens[:, 0]).argmax())
    check(tokens[tokens[:, 0] == common, 1], [common])


def test_a_stop_token_ends_its_row_and_the_last_one_the_loop(variables, run):
    free = run(MODEL, variables, PROMPTS, FEATURES, jax.random.key(0), GREEDY)
    tokens = np.asarray(free.tokens)
    stop = (int(tokens[0, 0]), int(tokens[1, 2]), int(tokens[2, 3]))
    lengths = [next(i for i, token in enumerate(row) if token in stop) + 1 for row in tokens]
    assert len(set(lengths)) > 1 and max(lengths) < 6
    config = GREEDY.replace(stop_tokens=stop, padding_token=61)
    state = PREFILL(MODEL, variables, PROMPTS, FEATURES, jax.random.key(0), config)
    found = DECODE(MODEL, variables, state, config, 6)
    assert int(found.step) == max(lengths)
    assert np.asarray(found.lengths).tolist() == lengths and np.asarray(found.stopped).all()
    for row, length in enumerate(lengths):
        assert np.asarray(found.tokens[row]).tolist() == [*tokens[row, :length], *[61] * (6 - length)]
        assert not np.asarray(found.log_probabilities[row, length:]).any()
        np.testing.assert_allclose(
            found.log_probabilities[row, :length], free.log_probabilities[row, :length], atol=1e-6
        )


def test_decoding_can_pause_and_go_on(variables, run):
    config = GREEDY.replace(temperature=1.0)
    state = PREFILL(MODEL, variables, PROMPTS, FEATURES, jax.random.key(2), config)
    state = DECODE(MODEL, variables, DECODE(MODEL, variables, state, config, 3), config, 6)
    whole = run(MODEL, variables, PROMPTS, FEATURES, jax.random.key(2), config)
    np.testing.assert_array_equal(state.tokens, whole.tokens)


def test_many_samples_cost_one_reading_of_the_prompt(variables):
    def flops(samples):
        config = GenerateConfig(max_new_tokens=4, samples=samples)
        lowered = jax.jit(prefill, static_argnums=0).lower(
            MODEL, variables, pad_prompts(PROMPTS, 3, 64), FEATURES, jax.random.key(0), config
        )
        return lowered.cost_analysis()["flops"]

    assert flops(4) < 1.2 * flops(1)


def test_the_cache_is_updated_where_it_lies(variables):
    config = GenerateConfig(max_new_tokens=448, samples=4)
    arguments = (variables, pad_prompts(PROMPTS, 3, 64), FEATURES, jax.random.key(0), config)
    shapes = jax.eval_shape(functools.partial(prefill, MODEL), *arguments)
    program = jax.jit(functools.partial(decode, MODEL), donate_argnums=1)
    compiled = program.lower(variables, shapes, config).compile()
    memory, cache = compiled.memory_analysis(), 2 * shapes.cache.keys.size * 4
    assert memory.alias_size_in_bytes >= cache
    assert memory.temp_size_in_bytes < cache
    keys = jax.random.split(jax.random.key(0), 12)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.replace(keys=None)).replace(keys=keys)
    address = state.cache.keys.unsafe_buffer_pointer()
    after = compiled(variables, state.replace(step=jnp.int32(446)), config)
    assert state.cache.keys.is_deleted() and after.cache.keys.unsafe_buffer_pointer() == address
    assert int(after.step) == 448


def test_log_probabilities_have_the_gradient_of_the_plain_formula(variables):
    tokens = jax.random.randint(jax.random.key(8), (3, 7), 0, 64)
    where = jnp.arange(7) < jnp.asarray([7, 4, 6])[:, None]

    def plain(variables):
        together = jnp.concatenate([PROMPTS.tokens, tokens], 1)
        positions = jnp.concatenate(
            [PROMPTS.positions, jnp.broadcast_to(PROMPTS.next_position[:, None] + jnp.arange(7), (3, 3, 7))],
            2,
        )
        rows = jnp.pad(PROMPTS.image_rows, ((0, 0), (0, 7)), constant_values=-1)
        mask = jnp.concatenate([PROMPTS.where, where], 1)
        logits = all_logits.__wrapped__(MODEL, variables, together, positions, mask, rows, FEATURES)[:, 6:-1]
        logits = jnp.where(jnp.arange(64) == 63, -jnp.inf, logits / 1.5)
        values = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)[..., 0]
        return jnp.sum(jnp.where(where, values, 0) * jnp.arange(1, 8))

    def ours(variables):
        values = log_probabilities(
            MODEL,
            variables,
            PROMPTS,
            FEATURES,
            tokens,
            where,
            temperature=1.5,
            forbidden_tokens=(63,),
            chunk=3,
        )
        return jnp.sum(values * jnp.arange(1, 8))

    assert not np.any(np.asarray(tokens) == 63)
    expected, found = (jax.jit(jax.value_and_grad(f))(variables) for f in (plain, ours))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(np.asarray(a)).max()),
        expected,
        found,
    )


def sizes(jaxpr):
    """Sizes of all arrays that a program makes, those of its inner programs included."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.size for variable in equation.outvars if hasattr(variable.aval, "size"))
        for inner in jaxprs_in_params(equation.params):
            yield from sizes(inner)


def test_the_logits_of_a_whole_completion_never_exist(variables):
    wide = Tiny(dataclasses.replace(CONFIG, vocabulary=16384))
    tokens, where = np.zeros((3, 128), np.int32), np.ones((3, 128), bool)
    shapes = jax.eval_shape(
        functools.partial(wide.init, method="everything"),
        *(jax.random.key(0), PROMPTS.tokens, PROMPTS.positions, PROMPTS.where, PROMPTS.image_rows, FEATURES),
    )

    def loss(variables, chunk):
        return log_probabilities(wide, variables, PROMPTS, FEATURES, tokens, where, chunk=chunk).sum()

    largest = {
        chunk: max(sizes(jax.make_jaxpr(jax.grad(functools.partial(loss, chunk=chunk)))(shapes).jaxpr))
        for chunk in (8, 128)
    }
    whole = 3 * 128 * 16384
    assert largest[128] >= whole and largest[8] < whole / 8


class Compilations:
    """Counts what XLA compiles, by JAX's own events."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self.listen)

    def listen(self, event, duration, **_):
        self.count += event == "/jax/core/compile/backend_compile_duration"


def test_a_second_call_in_the_same_bucket_compiles_nothing(variables, run):
    buckets = Buckets(prompts=(1, 4), prompt_tokens=(4, 8, 16), new_tokens=(4, 8, 16))
    compiled, generator = Compilations(), Generator(MODEL, buckets)
    config = GenerateConfig(temperature=0.8, max_new_tokens=6, samples=2)
    before = compiled.count
    found = generator.generate(variables, PROMPTS, FEATURES, jax.random.key(1), config)
    assert generator.compilations == 2 and compiled.count >= before + 2
    tokens, where = found.tokens[:, :4], found.where[:, :4]
    generator.log_probabilities(variables, PROMPTS, FEATURES, tokens, where, temperature=0.8)
    assert generator.compilations == 3
    before = compiled.count
    two = jax.tree.map(lambda x: x[..., :2, :] if x.ndim > 1 else x[:2], prompts_of(RAW, 14))
    less = config.replace(temperature=0.0, max_new_tokens=5)
    second = generator.generate(variables, two, FEATURES, jax.random.key(2), less)
    generator.log_probabilities(
        variables, two, FEATURES, second.tokens[:, :3], second.where[:, :3], temperature=0.3
    )
    assert compiled.count == before and generator.compilations == 3
    assert second.tokens.shape == (4, 5)
    assert second.tokens[::2].tolist() == [naive_greedy(variables, raw, 5) for raw in RAW[:2]]
    generator.generate(variables, PROMPTS, FEATURES, jax.random.key(1), config.replace(max_new_tokens=9))
    assert generator.compilations == 5 and compiled.count >= before + 2

    plain = run(MODEL, variables, PROMPTS, FEATURES, jax.random.key(1), config)
    np.testing.assert_array_equal(plain.tokens, found.tokens)
    np.testing.assert_allclose(plain.log_probabilities, found.log_probabilities, rtol=1e-5, atol=1e-5)


def test_prompts_beyond_the_largest_batch_run_in_parts(variables, run):
    generator = Generator(MODEL, Buckets(prompts=(1, 2), prompt_tokens=(4, 8)))
    config = GenerateConfig(temperature=1.1, max_new_tokens=4, samples=2, forbidden_tokens=(IMAGE_TOKEN,))
    found = generator.generate(variables, PROMPTS, FEATURES, jax.random.key(1), config)
    plain = run(MODEL, variables, PROMPTS, FEATURES, jax.random.key(1), config)
    np.testing.assert_array_equal(plain.tokens, found.tokens)
    again = generator.log_probabilities(
        variables,
        PROMPTS,
        FEATURES,
        found.tokens,
        found.where,
        temperature=1.1,
        forbidden_tokens=(IMAGE_TOKEN,),
    )
    np.testing.assert_allclose(again, found.log_probabilities, atol=1e-5)


@pytest.mark.parametrize(
    ("prompts", "features", "message"),
    [
        (prompts_of(RAW, 20), FEATURES, "prompt_tokens 7 found; the largest bucket is 4"),
        (PROMPTS, None, "prompt 0 refers to image row 3, but there are 0"),
        (PROMPTS, ImageFeatures(FEATURES.rows[:4]), "prompt 2 refers to image row 5, but there are 4"),
        (PROMPTS.replace(where=PROMPTS.where[:, ::-1]), FEATURES, "prompt 1 is padded on the right"),
        (
            PROMPTS.replace(where=PROMPTS.where & [[True], [False], [True]]),
            FEATURES,
            "prompt 1 has no tokens",
        ),
        (PROMPTS.replace(where=np.zeros((0, 7), bool)), FEATURES, "at least one prompt"),
    ],
)
def test_prompts_that_cannot_be_used(variables, prompts, features, message):
    generator = Generator(MODEL, Buckets(prompt_tokens=(4,)))
    with pytest.raises(ModelError, match=message):
        generator.generate(variables, prompts, features, jax.random.key(0), GREEDY)


def test_settings_that_cannot_be_used(variables):
    for fields in ({"max_new_tokens": 0}, {"samples": 0}, {"temperature": -0.1}, {"stop_tokens": (-1,)}):
        with pytest.raises(ConfigError, match="found; expected"):
            GenerateConfig(**fields)
    with pytest.raises(ConfigError, match="found; expected"):
        GenerateConfig(temperature=float("nan"))
    with pytest.raises(ConfigError, match="ascending"):
        Buckets(prompts=(2, 1))
    generator = Generator(MODEL)
    with pytest.raises(ConfigError, match="token id 64 found; expected ids below 64"):
        generator.generate(
            variables, PROMPTS, FEATURES, jax.random.key(0), GREEDY.replace(forbidden_tokens=(64,))
        )
    with pytest.raises(ModelError, match="new_tokens 8192 found"):
        config = GREEDY.replace(max_new_tokens=8192)
        generator.generate(variables, PROMPTS, FEATURES, jax.random.key(0), config)
    with pytest.raises(ConfigError, match="completions of shape"):
        generator.log_probabilities(
            variables, PROMPTS, FEATURES, np.zeros((4, 2), np.int32), np.ones((4, 2), bool)
        )

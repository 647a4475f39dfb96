"""Scorers on disk: exact round trips, and refusal by name of everything else."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxreward.checkpoints.pretrained import load_pretrained, load_scorer, save_scorer
from jaxreward.errors import ModelError, StorageError
from jaxreward.models.frame_ranker import FrameRanker, FrameRankerConfig

CONFIG = FrameRankerConfig(
    convolutions=((4, 4, 4), (4, 3, 1)), width=8, heads=2, hidden=8, blocks=1, frame_shape=(8, 12)
)


@pytest.fixture(scope="module")
def params():
    frames, where = jnp.zeros((1, 2, 8, 12, 1), jnp.uint8), jnp.ones((1, 2), bool)
    return FrameRanker(CONFIG).init(jax.random.key(0), frames, where)


@pytest.fixture
def saved(tmp_path, params):
    return save_scorer(tmp_path / "deep" / "folder", CONFIG, params, {"rho": 0.9})


def test_round_trip_is_exact_by_every_path(saved, params):
    for path in (saved, saved.with_suffix(".safetensors"), saved.parent):
        config, loaded, card = load_scorer(path)
        assert config == CONFIG and hash(config) == hash(CONFIG) and card["metadata"] == {"rho": 0.9}
        assert jax.tree.structure(loaded) == jax.tree.structure(params)
        jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert sorted(path.name for path in saved.parent.iterdir()) == ["scorer.json", "scorer.safetensors"]


def test_files_are_plain_safetensors(saved, params):
    tensors = safetensors.numpy.load_file(saved.with_suffix(".safetensors"))
    kernel = params["params"]["block_0"]["attention"]["key"]["kernel"]
    np.testing.assert_array_equal(tensors["params/block_0/attention/key/kernel"], kernel)
    assert json.loads(saved.read_text())["parameters"] == sum(tensor.size for tensor in tensors.values())


def rewrite(saved, change):
    """Changes the tensors and makes the checksum fit again, as a forger or a mix-up would."""
    import hashlib

    path = saved.with_suffix(".safetensors")
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    path.write_bytes(safetensors.numpy.save(tensors))
    card = json.loads(saved.read_text())
    card["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    saved.write_text(json.dumps(card))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("params/kinds"), "missing params/kinds"),
        (lambda t: t.update(extra=np.zeros(3, np.float32)), "unexpected extra"),
        (
            lambda t: t.update({"params/kinds": np.zeros((2, 9), np.float32)}),
            r"params/kinds is float32\[2, 9\], float32\[2, 8\] expected",
        ),
        (lambda t: t.update({"params/kinds": np.zeros((2, 8), np.float16)}), "float16"),
    ],
)
def test_wrong_parameters_are_named(saved, change, message):
    rewrite(saved, change)
    with pytest.raises(ModelError, match=message):
        load_scorer(saved)


def test_damaged_and_missing_files_are_refused(saved, tmp_path):
    weights = saved.with_suffix(".safetensors")
    good = weights.read_bytes()
    for bad in (b"", good[:100], good[:-1], good[:-1] + bytes([good[-1] ^ 1])):
        weights.write_bytes(bad)
        with pytest.raises(ModelError, match="sha256"):
            load_scorer(saved)
    weights.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        load_scorer(saved)
    with pytest.raises(ModelError, match="cannot be read"):
        load_scorer(tmp_path / "nothing.json")


def test_garbage_with_a_fitting_checksum_is_refused(saved):
    import hashlib

    garbage = b"\xff" * 64
    saved.with_suffix(".safetensors").write_bytes(garbage)
    card = json.loads(saved.read_text()) | {"sha256": hashlib.sha256(garbage).hexdigest()}
    saved.write_text(json.dumps(card))
    with pytest.raises(ModelError, match="not a readable safetensors"):
        load_scorer(saved)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "a record with"),
        ('{"format": 1}', "a record with"),
    ],
)
def test_wrong_records_are_refused(saved, text, message):
    saved.write_text(text)
    with pytest.raises(ModelError, match=message):
        load_scorer(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "Policy"}, "'Policy'"),
        ({"format": 99}, "format 99"),
        ({"config": {"width": 3}}, "the fields"),
        ({"config": vars(CONFIG) | {"heads": 3}}, "cannot be built"),
        ({"config": vars(CONFIG) | {"heads": "two"}}, "cannot be built"),
        ({"config": vars(CONFIG) | {"width": 16}}, "do not fit"),
    ],
)
def test_wrong_fields_are_named(saved, change, message):
    saved.write_text(json.dumps(json.loads(saved.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        load_scorer(saved)


def test_saving_checks_too(tmp_path, params):
    with pytest.raises(ModelError, match="frame_shape is None"):
        save_scorer(tmp_path, FrameRankerConfig(), params, {})
    with pytest.raises(ModelError, match="missing"):
        save_scorer(tmp_path, CONFIG, {"params": {}}, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        save_scorer(tmp_path / "file", CONFIG, params, {})


def test_unknown_shipped_scorers_are_refused_with_the_known_ones():
    with pytest.raises(ModelError, match=r"no shipped scorer 'nothing'; available: "):
        load_pretrained("nothing")

import pytest

from jaxreward.errors import ModelError
from jaxreward.models.hub_config import Fields, read_json

FIELDS = Fields(
    {
        "width": 8,
        "epsilon": 1e-5,
        "whole": 2,
        "tied": False,
        "act": "gelu",
        "sections": [1, 0],
        "tower": {"depth": None},
    }
)


def test_fields_are_read_by_type():
    assert FIELDS.integer("width") == 8
    assert FIELDS.number("epsilon") == 1e-5
    assert isinstance(FIELDS.number("whole"), float)
    assert FIELDS.flag("tied") is False
    assert FIELDS.choice("act", ("gelu", "relu")) == "gelu"
    assert FIELDS.integers("sections") == (1, 0)
    assert FIELDS.has("width") and not FIELDS.has("height")


def test_absent_and_null_fields_take_the_default():
    assert FIELDS.section("tower").integer("depth", 12) == 12
    assert FIELDS.integer("depth", 3) == 3
    assert FIELDS.section("nothing", optional=True).number("epsilon", 1.0) == 1.0
    assert FIELDS.flag("absent", True) is True


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (
            lambda f: f.section("tower").integer("depth"),
            "field tower.depth is missing; an integer of at least 1",
        ),
        (lambda f: f.integer("act"), "field act is 'gelu'; an integer of at least 1 was expected"),
        (lambda f: f.integer("tied", least=0), "field tied is False; an integer of at least 0"),
        (lambda f: f.integer("whole", least=3), "field whole is 2; an integer of at least 3"),
        (lambda f: f.number("act"), "field act is 'gelu'; a number"),
        (lambda f: f.flag("whole"), "field whole is 2; true or false"),
        (lambda f: f.choice("act", ("silu", "relu")), "field act is 'gelu'; one of relu, silu was expected"),
        (lambda f: f.integers("width"), "field width is 8; a list of integers"),
        (lambda f: f.section("width"), "width is 8; a JSON object was expected"),
        (lambda f: f.section("nothing"), "field nothing is missing; a JSON object"),
        (lambda f: Fields({"x": float("nan")}).number("x"), "field x is nan; a number"),
    ],
)
def test_a_wrong_field_is_named(read, message):
    with pytest.raises(ModelError) as caught:
        read(FIELDS)
    assert f"config.json: {message}" in str(caught.value)


@pytest.mark.parametrize("content", ["[1]", "{", "", "[" * 100_000], ids=["list", "open", "empty", "deep"])
def test_a_file_that_holds_no_object_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_json(path)
    with pytest.raises(ModelError, match="does not exist"):
        read_json(tmp_path / "other.json")

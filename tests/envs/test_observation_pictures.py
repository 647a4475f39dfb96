"""Pictures of observations against pictures drawn by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreward.envs.pictures import ObservationPicture


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_bars_between_bounds():
    picture = ObservationPicture(spec(4), low=np.array([0, -1, 0, 5]), high=np.array([1, 1, 10, 6]))
    image = np.asarray(picture(jnp.array([1.0, 0.0, 2.5, 4.0])))
    expected = np.zeros((84, 84, 3), np.uint8)
    expected[:, 0:21] = 255  # at its upper bound
    expected[42:, 21:42] = 255  # half-way
    expected[63:, 42:63] = 255  # a quarter; the fourth is below its lower bound
    np.testing.assert_array_equal(image, expected)


@pytest.mark.parametrize("bound", [np.inf, np.finfo(np.float32).max])
def test_bars_without_bounds(bound):
    picture = ObservationPicture(spec(3), low=-bound, high=bound)
    heights = (np.asarray(picture(jnp.array([0.0, 1.0, -3.0])))[:, [0, 30, 60], 0] == 255).sum(axis=0)
    # 1/2, 1/2 + 1/4 and 1/2 - 3/8 of 84, the last of which is 10.5.
    assert heights.tolist() in ([42, 63, 10], [42, 63, 11])


def test_more_numbers_than_pixels_make_a_wider_picture():
    picture = ObservationPicture(spec(244), low=0, high=1)
    assert picture.image_shape == (84, 244, 3)
    image = picture(jnp.arange(244) % 2)
    np.testing.assert_array_equal(image[0, :, 0], 255 * (np.arange(244) % 2))


def test_layers_become_grey_levels():
    cells = np.zeros((10, 10, 4), np.float32)
    cells[0, 0, 0] = cells[1, 2, 3] = cells[5, 5, 0] = cells[5, 5, 1] = 1
    picture = ObservationPicture(spec(10, 10, 4))
    assert picture.image_shape == (90, 90, 3)
    image = np.asarray(picture(jnp.array(cells)))
    expected = np.zeros((10, 10), np.uint8)
    expected[0, 0], expected[1, 2], expected[5, 5] = 64, 255, 128  # 1/4, 4/4, 2/4 of 255
    np.testing.assert_array_equal(
        image, np.kron(expected, np.ones((9, 9), np.uint8))[..., None].repeat(3, -1)
    )


def test_a_matrix_and_a_picture():
    matrix = ObservationPicture(spec(2, 42), low=0, high=2)
    image = np.asarray(matrix(jnp.zeros((2, 42)).at[1, 0].set(2)))
    assert image.shape == (84, 84 * 21, 3) and image.sum() == 42 * 42 * 3 * 255 and image[83, 0, 0] == 255
    pixels = jnp.arange(5 * 6 * 3, dtype=jnp.uint8).reshape(5, 6, 3)
    np.testing.assert_array_equal(ObservationPicture(spec(5, 6, 3, dtype=jnp.uint8))(pixels), pixels)


def test_leading_axes_and_trees():
    tree = {"a": spec(2), "b": spec(), "c": spec(3, 3, dtype=jnp.int32)}
    picture = ObservationPicture(tree)
    values = {"a": jnp.ones((5, 4, 2)), "b": jnp.ones((5, 4)), "c": jnp.ones((5, 4, 3, 3), jnp.int32)}
    image = jax.jit(picture)(values)
    assert image.shape == (5, 4, 84, 84, 3) and image.dtype == jnp.uint8
    assert (image[..., 21:, :, :] == 255).all() and (image[..., :21, :, :] == 0).all()

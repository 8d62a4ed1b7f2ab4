"""The colours of all figures are distinguishable and contrast with their background."""

import itertools

import numpy as np
import pytest

from orchestrator.report import palette

# Machado, Oliveira and Fernandes 2009, severity 1, for linear RGB
SIGHT = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.089])
CLEARLY = 12.0  # CIELAB distance; 2.3 is just noticeable


def linear(colour):
    values = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    x = XYZ @ np.clip(rgb, 0, 1) / WHITE
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(a, b):
    light, dark = sorted((float(XYZ[1] @ linear(c)) for c in (a, b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("colours", [palette.ON_LIGHT, palette.ON_DARK])
def test_any_two_colours_are_distinguishable(colours, sight):
    seen = {colour: lab(np.array(SIGHT[sight]) @ linear(colour)) for colour in colours}
    for a, b in itertools.combinations(colours, 2):
        assert np.linalg.norm(seen[a] - seen[b]) > CLEARLY, (a, b)


@pytest.mark.parametrize(("colours", "ground"), [(palette.ON_LIGHT, palette.LIGHT), (palette.ON_DARK, palette.DARK)])
def test_each_colour_contrasts_with_its_background(colours, ground):
    """WCAG requires 3:1 for graphics."""
    for colour in colours:
        assert contrast(colour, ground) >= 3, colour


def test_no_two_of_many_methods_look_the_same():
    looks = [palette.look(number, variant) for number in range(16) for variant in range(2)]
    assert len(set(looks)) == len(looks)
    assert palette.look(3, 0).colour == palette.look(3, 1).colour, "one method, one colour"

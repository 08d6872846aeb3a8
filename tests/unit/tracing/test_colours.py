"""The page's colours differ for every kind of colour vision (Machado et al. 2009, severity 1)."""

import itertools
import re
from importlib.resources import files

import numpy as np
import pytest
from numpy.typing import NDArray

VISION = {
    "normal": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}  # fmt: skip
TO_XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
WHITE = [0.9505, 1.0, 1.089]
# These lie side by side on a core's lane; reads have a lane of their own.
CATEGORIES = ("dense", "hot", "predict", "group", "gate", "updown", "stall", "wait")
LEAST_DIFFERENCE = 12
"""CIE 1976; 2.3 is just noticeable side by side."""

LIGHT, DARK = (files("polyneuron.tracing") / "page" / "colours.css").read_text().split("@media")


def lab(colour: str, vision: str) -> NDArray[np.float64]:
    coded = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(VISION[vision]) @ linear, 0, 1)
    xyz = np.array(TO_XYZ) @ seen / np.array(WHITE)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("style", [LIGHT, DARK], ids=["light", "dark"])
def test_categories_are_told_apart(style: str, vision: str) -> None:
    colours = dict(re.findall(r"--(\w+): (#\w{6})", style))
    for one, other in itertools.combinations(CATEGORIES, 2):
        difference = np.linalg.norm(lab(colours[one], vision) - lab(colours[other], vision))
        assert difference > LEAST_DIFFERENCE, (one, other)


@pytest.mark.parametrize("style", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("text", ["ink", "soft", "bad", "accent"])
def test_text_is_readable(style: str, text: str) -> None:
    """WCAG's 4.5 to 1, on panels and on the page."""
    colours = dict(re.findall(r"--(\w+): (#\w{6})", style))

    def luminance(name: str) -> float:
        return ((float(lab(colours[name], "normal")[0]) + 16) / 116) ** 3

    for ground in ("panel", "ground"):
        low, high = sorted([luminance(text), luminance(ground)])
        assert (high + 0.05) / (low + 0.05) >= 4.5

"""Reads back what a chart shows from its figure."""

from __future__ import annotations

import base64
import io
from xml.etree.ElementTree import Element

import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.image import imread

from sglang_uvm_offload.report.charts import Chart, picture


def cells_of(chart: Chart, kinds) -> list[np.ndarray]:
    """What a map shows: the kind of each cell, -1 where it is empty, read back from each picture of the report."""
    return [_cells(image, kinds) for image in picture(chart).iter("image")]


def _cells(image: Element, kinds) -> np.ndarray:
    data = base64.b64decode(image.get("href").partition("base64,")[2])
    pixels = imread(io.BytesIO(data))
    pixels = pixels[::-1] if "scale(1 -1)" in image.get("transform", "") else pixels
    out = np.full(pixels.shape[:2], -1)
    for kind, (_, colour) in enumerate(kinds):
        out[np.abs(pixels - to_rgba(colour)).max(axis=2) < 0.01] = kind
    return out

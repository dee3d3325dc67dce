"""scikit-learn's handwritten digits (1,797 images of 8×8, shipped inside that package) as a dataset for a ViT."""

from __future__ import annotations

import numpy as np

from layoutopt.errors import LayoutOptError
from layoutopt.train import Dataset

__all__ = ["load"]


def load() -> Dataset:
    """Images float32 [1797, 1, 8, 8], standardised, and labels int32 [1797].

    Raises:
        LayoutOptError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise LayoutOptError("the digits need scikit-learn: pip install 'layoutopt[demo]'") from error
    digits = load_digits()
    pixels = digits.images.astype(np.float32)
    pixels = (pixels - pixels.mean()) / pixels.std()
    return Dataset({"pixel_values": pixels[:, None], "labels": digits.target.astype(np.int32)})

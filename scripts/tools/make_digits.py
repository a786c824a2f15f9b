"""Write gradwatch/data/files/digits.npz from the copy of the UCI digits that scikit-learn ships."""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

OUT = Path(__file__).parents[2] / "gradwatch" / "data" / "files" / "digits.npz"


def main() -> None:
    """Store images (1797, 8, 8), 0 to 16, and labels (1797,) as bytes: the same file each time."""
    digits = load_digits()
    np.savez_compressed(OUT, images=digits.images.astype(np.uint8), labels=digits.target.astype(np.uint8))
    print(f"{OUT}: {len(digits.target)} digits, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()

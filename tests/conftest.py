"""Settings for every test: one torch thread, so that the tests of a small machine do not fight for cores."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    import torch

    torch.set_num_threads(1)

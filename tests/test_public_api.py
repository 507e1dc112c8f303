"""`import specstop`: the public names."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import specstop as ss


def test_every_public_name_can_be_imported() -> None:
    assert {"load_pair", "load_trace", "load_profile", "load_policy", "collect", "measure_profile"} <= set(dir(ss))
    assert {"train", "evaluate", "decode", "bench", "replay", "StopPolicy", "custom_feature"} <= set(dir(ss))
    for name in ss.__all__:
        assert getattr(ss, name) is not None
    assert not hasattr(ss, "evaluat")
    assert ss.__version__[0].isdigit()
    assert (Path(ss.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("name", ["collect", "decode", "train"])
def test_a_package_can_be_called_like_its_function(name: str) -> None:
    package = getattr(ss, name)
    assert package is sys.modules[f"specstop.{name}"]
    assert inspect.signature(package) == inspect.signature(getattr(package, name))
    with pytest.raises(TypeError):
        package()


def test_the_import_loads_no_library() -> None:
    code = "import sys, specstop; sys.exit(bool({'numpy', 'torch', 'numba', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
